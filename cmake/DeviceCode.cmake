# The GPU kernels, compiled to code objects that become part of the library. That takes neither a GPU
# nor a driver nor ROCm, but a compiler for each vendor's devices.
set(KVXFER_HIP_TARGETS gfx942 gfx950 CACHE STRING "AMD devices that kernels are compiled for")
set(KVXFER_CUDA_TARGETS 80 90 100 CACHE STRING "NVIDIA devices that kernels are compiled for")

# Older ones do not know gfx950.
find_program(KVXFER_HIP_CLANG NAMES clang++-22 clang++-23 amdclang++
             HINTS /opt/rocm/llvm/bin /opt/rocm/bin DOC "clang that compiles for AMD devices")
find_program(KVXFER_HIP_LLD NAMES ld.lld-22 ld.lld-23 ld.lld HINTS /opt/rocm/llvm/bin
             DOC "linker that it calls")
find_program(KVXFER_NVCC NAMES nvcc HINTS /usr/local/cuda/bin DOC "compiler for NVIDIA devices")

if(KVXFER_HIP_CLANG AND KVXFER_HIP_LLD)
  list(JOIN KVXFER_HIP_TARGETS ", " targets)
  kvxfer_back_end(HIP REASON "kernels for ${targets}, libamdhip64 is loaded when it is used")
else()
  kvxfer_back_end(HIP UNAVAILABLE "no kernels: clang++-22 with ld.lld-22, or ROCm's amdclang++, was not found")
endif()
if(KVXFER_NVCC)
  list(TRANSFORM KVXFER_CUDA_TARGETS PREPEND "sm_" OUTPUT_VARIABLE targets)
  list(JOIN targets ", " targets)
  kvxfer_back_end(CUDA REASON "kernels for ${targets}, libcuda is loaded when it is used")
else()
  kvxfer_back_end(CUDA UNAVAILABLE "no kernels: nvcc was not found")
endif()

# kvxfer_device_code(<variable>) sets the variable to a source file that holds the code objects of the
# back ends that are on: see csrc/device/code_objects.h.
function(kvxfer_device_code result)
  file(GLOB headers CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/pack/gpu_*.h
       ${CMAKE_SOURCE_DIR}/csrc/device/kernel/*.h)
  list(FILTER headers EXCLUDE REGEX "/gpu_(packer|lane|panel_table|raw_table)\\.h$")  # the host's
  set(folder ${CMAKE_BINARY_DIR}/device_code)
  file(MAKE_DIRECTORY ${folder})
  set(options -std=c++20 -O3 -I${CMAKE_SOURCE_DIR}/csrc/include -I${CMAKE_SOURCE_DIR}/csrc)
  set(objects)
  set(entries)
  macro(compile vendor target object)
    add_custom_command(OUTPUT ${object} COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${ARGN} ${options}
                       -o ${object} DEPENDS ${source} ${headers}
                       COMMENT "Compiling the GPU kernels for ${target}" VERBATIM)
    list(APPEND objects ${object})
    string(APPEND entries "KVXFER_CODE_OBJECT(${vendor}, ${target}, \"${object}\")\n")
  endmacro()

  if(KVXFER_HIP_STATE STREQUAL "on")
    set(source ${CMAKE_SOURCE_DIR}/csrc/pack/gpu_kernels.hip)
    foreach(target ${KVXFER_HIP_TARGETS})
      # ROCm 5 and newer load version 5 of code objects.
      compile(kAmd ${target} ${folder}/${target}.co ${KVXFER_HIP_CLANG} -x hip --cuda-device-only
              --no-gpu-bundle-output -nogpulib -nogpuinc --offload-arch=${target}
              -mcode-object-version=5 -ffp-contract=off -c ${source})
    endforeach()
  endif()
  if(KVXFER_CUDA_STATE STREQUAL "on")
    set(source ${CMAKE_SOURCE_DIR}/csrc/pack/gpu_kernels.cu)
    foreach(number ${KVXFER_CUDA_TARGETS})
      compile(kNvidia sm_${number} ${folder}/sm_${number}.fatbin ${KVXFER_NVCC} -fmad=false -fatbin
              -Xfatbin=-compress-all -gencode arch=compute_${number},code=sm_${number} ${source})
    endforeach()
  endif()

  set(KVXFER_CODE_OBJECTS "${entries}")
  configure_file(${CMAKE_SOURCE_DIR}/cmake/code_objects.cc.in ${folder}/code_objects.cc @ONLY)
  set_source_files_properties(${folder}/code_objects.cc PROPERTIES OBJECT_DEPENDS "${objects}")
  set(${result} ${folder}/code_objects.cc PARENT_SCOPE)
endfunction()
