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
