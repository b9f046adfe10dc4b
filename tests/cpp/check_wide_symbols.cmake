# The objects with wide instructions may define no function that another object might use in their place: an inline
# function of a shared header compiled there could be the copy that the linker keeps, on a processor without them.
# Arguments: NM, OBJECTS.
set(CHECKED 0)
foreach(object ${OBJECTS})
  if(NOT object MATCHES "isa_avx(2|512)\\.cpp")
    continue()
  endif()
  math(EXPR CHECKED "${CHECKED} + 1")
  execute_process(COMMAND ${NM} -C --defined-only ${object} OUTPUT_VARIABLE SYMBOLS RESULT_VARIABLE FAILED)
  if(FAILED)
    message(FATAL_ERROR "${NM} ${object}: expected exit status 0, got ${FAILED}")
  endif()
  string(REPLACE "\n" ";" SYMBOLS "${SYMBOLS}")
  foreach(symbol ${SYMBOLS})
    # W, V, u: merged over objects. A name of the object's own namespace cannot clash.
    if(symbol MATCHES "^[0-9a-f]+ [WVu] .*\\(" AND NOT symbol MATCHES "kernels::avx(2|512)::")
      message(FATAL_ERROR "${object}: expected no shared function, got ${symbol}")
    endif()
  endforeach()
endforeach()
message(STATUS "objects checked: ${CHECKED}")
