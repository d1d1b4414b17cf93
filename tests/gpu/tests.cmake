# The GPU kernels run as fibers on the host, at both wave sizes, and under the code that launches them
# on runtimes of our own. For include() where kvxfer_core and DOCTEST_INCLUDE_DIR are known; needs
# neither a GPU nor a compiler for one.
file(GLOB gpu_test_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cc)
set(fake_gpu_sources ${gpu_test_sources})
list(FILTER fake_gpu_sources INCLUDE REGEX "/fake_[a-z]*\\.cc$")
list(FILTER gpu_test_sources EXCLUDE REGEX "/fake_[a-z]*\\.cc$")
list(APPEND gpu_test_sources ${CMAKE_CURRENT_LIST_DIR}/../cpp/failing_new.cc)
foreach(wave 32 64)
  # Small workgroups: each of their threads is a stack to switch to.
  set(definitions KVXFER_WAVE=${wave} KVXFER_GPU_THREADS=128)
  set(fake kvxfer_fake_gpu_${wave})
  add_library(${fake} SHARED ${fake_gpu_sources})
  target_include_directories(${fake} PRIVATE csrc csrc/include tests)
  target_link_libraries(${fake} PRIVATE kvxfer_flags Threads::Threads)
  target_compile_definitions(${fake} PRIVATE ${definitions})
  target_compile_options(${fake} PRIVATE -O1 -ffp-contract=off)
  add_executable(kvxfer_gpu_tests_${wave} ${gpu_test_sources})
  target_include_directories(kvxfer_gpu_tests_${wave} PRIVATE csrc tests)
  target_include_directories(kvxfer_gpu_tests_${wave} SYSTEM PRIVATE ${DOCTEST_INCLUDE_DIR})
  target_link_libraries(kvxfer_gpu_tests_${wave} PRIVATE kvxfer_core)
  target_compile_definitions(kvxfer_gpu_tests_${wave}
                             PRIVATE ${definitions} "KVXFER_FAKE_GPU=\"$<TARGET_FILE:${fake}>\"")
  target_compile_options(kvxfer_gpu_tests_${wave} PRIVATE -O1 -ffp-contract=off)
  add_dependencies(kvxfer_gpu_tests_${wave} ${fake})
endforeach()
