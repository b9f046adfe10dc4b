# Writes a CUDA source as C++ for the emulation of tests/cuda_sim/include/cuemu.h: launches become macros, and the rest
# is as it was, line by line.
# Arguments: SOURCE, OUTPUT.
file(READ ${SOURCE} TEXT)
string(REGEX REPLACE "([A-Za-z0-9_]+(<[A-Za-z0-9_, ]+>)?)<<<([^;>]+)>>>\\(" "CU_LAUNCH((\\1), \\3, " EMULATED "${TEXT}")
if(EMULATED STREQUAL TEXT OR EMULATED MATCHES "<<<")
  message(FATAL_ERROR "${SOURCE}: expected launches of the form kernel<T><<<grid, block, shared, stream>>>(...)")
endif()
file(WRITE ${OUTPUT} "#include \"cuemu.h\"\n#line 1 \"${SOURCE}\"\n${EMULATED}")
