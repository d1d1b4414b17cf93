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

set(options -std=c++20 -O3 -I${CMAKE_SOURCE_DIR}/csrc/include -I${CMAKE_SOURCE_DIR}/csrc)
# ROCm 5 and newer load version 5 of code objects.
set(KVXFER_HIP_COMMAND ${KVXFER_HIP_CLANG} -x hip --cuda-device-only --no-gpu-bundle-output -nogpulib
    -nogpuinc --offload-arch=TARGET -mcode-object-version=5 -ffp-contract=off ${options} -c)
set(KVXFER_CUDA_COMMAND ${KVXFER_NVCC} -fmad=false -fatbin -Xfatbin=-compress-all
    -gencode arch=compute_TARGET,code=sm_TARGET ${options})

# kvxfer_refusal(<variable> <name> <suffix>) sets the variable to what the compiler says against the first
# target that it does not take: it may be older than a device, lack AMD's back end, or refuse the
# host's compiler. Asked once for a tree.
function(kvxfer_refusal result name suffix)
  set(asked ${KVXFER_${name}_COMMAND} ${KVXFER_${name}_TARGETS})
  if(NOT "${KVXFER_${name}_ASKED}" STREQUAL "${asked}")
    set(probe ${CMAKE_BINARY_DIR}/device_code/probe)
    file(WRITE ${probe}.${suffix} "#include \"device/kernel/device.h\"\n")
    set(refusal)
    foreach(target ${KVXFER_${name}_TARGETS})
      string(REPLACE TARGET ${target} command "${KVXFER_${name}_COMMAND}")
      execute_process(COMMAND ${command} -o ${probe}.out ${probe}.${suffix} TIMEOUT 120
                      RESULT_VARIABLE status OUTPUT_VARIABLE said ERROR_VARIABLE said)
      if(NOT status STREQUAL "0")
        message(STATUS "no kernels for ${target}: ${said}")
        list(GET command 0 compiler)
        set(refusal "${compiler} does not compile for ${target}; KVXFER_${name}_TARGETS names others")
        break()
      endif()
    endforeach()
    set(KVXFER_${name}_ASKED "${asked}" CACHE INTERNAL "")
    set(KVXFER_${name}_REFUSAL "${refusal}" CACHE INTERNAL "")
  endif()
  set(${result} "${KVXFER_${name}_REFUSAL}" PARENT_SCOPE)
endfunction()

if(NOT (KVXFER_HIP_CLANG AND KVXFER_HIP_LLD))
  set(refusal "clang++-22 with ld.lld-22, or ROCm's amdclang++, was not found")
elseif(NOT KVXFER_WITH_HIP STREQUAL "off")
  kvxfer_refusal(refusal HIP hip)
endif()
if(refusal)
  kvxfer_back_end(HIP UNAVAILABLE "no kernels: ${refusal}")
else()
  list(JOIN KVXFER_HIP_TARGETS ", " targets)
  kvxfer_back_end(HIP REASON "kernels for ${targets}, libamdhip64 is loaded when it is used")
endif()
set(refusal)
if(NOT KVXFER_NVCC)
  set(refusal "nvcc was not found")
elseif(NOT KVXFER_WITH_CUDA STREQUAL "off")
  kvxfer_refusal(refusal CUDA cu)
endif()
if(refusal)
  kvxfer_back_end(CUDA UNAVAILABLE "no kernels: ${refusal}")
else()
  list(TRANSFORM KVXFER_CUDA_TARGETS PREPEND "sm_" OUTPUT_VARIABLE targets)
  list(JOIN targets ", " targets)
  kvxfer_back_end(CUDA REASON "kernels for ${targets}, libcuda is loaded when it is used")
endif()

# kvxfer_device_code(<variable>) sets the variable to a source file that holds the code objects of the
# back ends that are on: see csrc/device/code_objects.h.
function(kvxfer_device_code result)
  file(GLOB headers CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/pack/gpu_*.h
       ${CMAKE_SOURCE_DIR}/csrc/device/kernel/*.h)
  list(FILTER headers EXCLUDE REGEX "/gpu_(packer|lane|panel_table|raw_table)\\.h$")  # the host's
  set(folder ${CMAKE_BINARY_DIR}/device_code)
  file(MAKE_DIRECTORY ${folder})
  set(objects)
  set(entries)
  macro(compile vendor name number target source object)
    string(REPLACE TARGET ${number} command "${KVXFER_${name}_COMMAND}")
    add_custom_command(OUTPUT ${object} COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${command} ${source}
                       -o ${object} DEPENDS ${source} ${headers}
                       COMMENT "Compiling the GPU kernels for ${target}" VERBATIM)
    list(APPEND objects ${object})
    string(APPEND entries "KVXFER_CODE_OBJECT(${vendor}, ${target}, \"${object}\")\n")
  endmacro()

  set(kernels ${CMAKE_SOURCE_DIR}/csrc/pack/gpu_kernels)
  if(KVXFER_HIP_STATE STREQUAL "on")
    foreach(target ${KVXFER_HIP_TARGETS})
      compile(kAmd HIP ${target} ${target} ${kernels}.hip ${folder}/${target}.co)
    endforeach()
  endif()
  if(KVXFER_CUDA_STATE STREQUAL "on")
    foreach(number ${KVXFER_CUDA_TARGETS})
      compile(kNvidia CUDA ${number} sm_${number} ${kernels}.cu ${folder}/sm_${number}.fatbin)
    endforeach()
  endif()

  set(KVXFER_CODE_OBJECTS "${entries}")
  configure_file(${CMAKE_SOURCE_DIR}/cmake/code_objects.cc.in ${folder}/code_objects.cc @ONLY)
  set_source_files_properties(${folder}/code_objects.cc PROPERTIES OBJECT_DEPENDS "${objects}")
  set(${result} ${folder}/code_objects.cc PARENT_SCOPE)
endfunction()
