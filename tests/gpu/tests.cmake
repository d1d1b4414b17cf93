# The GPU kernels run as fibers on the host, at both wave sizes. For include() where kvxfer_core and
# DOCTEST_INCLUDE_DIR are known; needs neither a GPU nor a compiler for one.
file(GLOB gpu_test_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cc)
foreach(wave 32 64)
  add_executable(kvxfer_gpu_tests_${wave} ${gpu_test_sources})
  target_include_directories(kvxfer_gpu_tests_${wave} PRIVATE csrc tests)
  target_include_directories(kvxfer_gpu_tests_${wave} SYSTEM PRIVATE ${DOCTEST_INCLUDE_DIR})
  target_link_libraries(kvxfer_gpu_tests_${wave} PRIVATE kvxfer_core)
  # Small workgroups: each of their threads is a stack to switch to.
  target_compile_definitions(kvxfer_gpu_tests_${wave}
                             PRIVATE KVXFER_WAVE=${wave} KVXFER_GPU_THREADS=128)
  target_compile_options(kvxfer_gpu_tests_${wave} PRIVATE -O1 -ffp-contract=off)
endforeach()
