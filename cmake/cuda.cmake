# The CUDA kernels: run on the CPU by an emulation, and compiled by nvcc where there is one.

file(GLOB CUDA_SOURCES CONFIGURE_DEPENDS ${CSRC}/kernels/cuda/*.cu)
file(GLOB CUDA_HEADERS CONFIGURE_DEPENDS ${CSRC}/kernels/cuda/*.cuh ${CSRC}/kernels/cuda/*.h ${CSRC}/kernels/*.h)

# [Note: emulation] tests/cuda_sim/include runs the unchanged kernels on the CPU. Under ThreadSanitizer every thread of a
# block is one of the operating system (it sees missing barriers, and cases are small); else threads are fibers.
set(EMULATED)
foreach(source ${CUDA_SOURCES})
  get_filename_component(name ${source} NAME_WE)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/emulated/cuda_${name}.cpp)
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -DSOURCE=${source} -DOUTPUT=${output} -P ${CMAKE_CURRENT_LIST_DIR}/emulate_cuda.cmake
    DEPENDS ${source} ${CMAKE_CURRENT_LIST_DIR}/emulate_cuda.cmake)
  list(APPEND EMULATED ${output})
endforeach()
add_library(zerocore_kernels_emulated STATIC ${EMULATED} ${TESTS}/count_bytes.cpp)
target_include_directories(zerocore_kernels_emulated PRIVATE ${CSRC}/kernels/cuda)
target_include_directories(zerocore_kernels_emulated SYSTEM PUBLIC ${ROOT}/tests/cuda_sim/include)
target_compile_definitions(zerocore_kernels_emulated PUBLIC CUEMU_NO_CUDA_HEADERS ZEROCORE_COUNT_BYTES)
target_compile_features(zerocore_kernels_emulated PUBLIC cxx_std_20)
target_compile_options(zerocore_kernels_emulated PRIVATE -Wno-unknown-pragmas)
target_link_libraries(zerocore_kernels_emulated PUBLIC zerocore_kernels ${CMAKE_DL_LIBS})
if(ZEROCORE_SANITIZE MATCHES "thread")
  target_compile_definitions(zerocore_kernels_emulated PUBLIC CUEMU_THREADS)
endif()
foreach(name adamw norm pack reduce)
  add_cpp_test(cuda_${name} zerocore_kernels_emulated)
endforeach()

# [Note: nvcc] Where nvcc is, it compiles every kernel for the architectures that setup.py builds by default, with
# warnings as errors, and two tests look at what came out: no kernel spills registers, and all move 16 bytes at a time.
find_program(NVCC nvcc HINTS ENV CUDA_HOME PATH_SUFFIXES bin)
if(NOT NVCC)
  message(STATUS "nvcc: not found; CUDA kernels are not compiled for GPUs")
  return()
endif()
if(ZEROCORE_SANITIZE MATCHES "thread")
  return() # the build with the other sanitizers does it: once is enough
endif()
set(ARCHITECTURES 80 90 100)
set(NVCC_FLAGS -std=c++17 -O3 -fmad=false -lineinfo -I${CSRC} -Xptxas=-v,-warn-spills -Werror=all-warnings
               -Xcompiler=-Wall,-Wextra,-Werror,-ffp-contract=off)
foreach(architecture ${ARCHITECTURES})
  list(APPEND NVCC_FLAGS -gencode=arch=compute_${architecture},code=sm_${architecture})
endforeach()
list(APPEND NVCC_FLAGS -gencode=arch=compute_100,code=compute_100) # for later GPUs
set(CUDA_OBJECTS)
foreach(source ${CUDA_SOURCES})
  get_filename_component(name ${source} NAME_WE)
  set(object ${CMAKE_CURRENT_BINARY_DIR}/nvcc/${name}.o)
  string(JOIN " " COMMAND_LINE ${NVCC} ${NVCC_FLAGS} -c ${source} -o ${object})
  add_custom_command(
    OUTPUT ${object} ${object}.log
    COMMAND sh -c "${COMMAND_LINE} > ${object}.log 2>&1 || { cat ${object}.log; exit 1; }"
    DEPENDS ${source} ${CUDA_HEADERS}
    VERBATIM)
  list(APPEND CUDA_OBJECTS ${object})
endforeach()
add_custom_target(zerocore_kernels_nvcc ALL DEPENDS ${CUDA_OBJECTS})

list(TRANSFORM CUDA_OBJECTS APPEND .log OUTPUT_VARIABLE CUDA_LOGS)
add_test(NAME cuda_spills COMMAND ${CMAKE_COMMAND} "-DLOGS=${CUDA_LOGS}" -P ${TESTS}/check_spills.cmake)

# On PyPI: nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, which it calls.
get_filename_component(NVCC_FOLDER ${NVCC} DIRECTORY)
file(GLOB WHEELS ${ROOT}/.venv*/lib/python*/site-packages/nvidia/*/bin)
find_program(CUOBJDUMP cuobjdump HINTS ${NVCC_FOLDER} ENV CUDA_HOME ${WHEELS} PATH_SUFFIXES bin)
if(NOT CUOBJDUMP)
  message(STATUS "cuobjdump: not found; what nvcc made is not checked for 16-byte accesses")
  return()
endif()
get_filename_component(CUOBJDUMP_FOLDER ${CUOBJDUMP} DIRECTORY)
foreach(object ${CUDA_OBJECTS})
  get_filename_component(name ${object} NAME_WE)
  add_test(NAME cuda_sass_${name}
           COMMAND sh -c "${CUOBJDUMP} -sass ${object} | awk -f ${TESTS}/check_sass.awk")
  set_tests_properties(cuda_sass_${name} PROPERTIES ENVIRONMENT "PATH=${CUOBJDUMP_FOLDER}:$ENV{PATH}")
endforeach()
