# The interface library kvxfer_flags: language level, warnings, visibility, sanitizers and what keeps
# builds reproducible, for every target of ours.

set(KVXFER_SANITIZE "" CACHE STRING "Sanitizers: empty, thread, or address,undefined")
option(KVXFER_WERROR "Treat warnings as errors" OFF)

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12)
  message(FATAL_ERROR "kvxfer needs g++ 12 or newer, found ${CMAKE_CXX_COMPILER} "
                      "${CMAKE_CXX_COMPILER_VERSION}. Install one (Debian, Ubuntu: apt-get install "
                      "g++-12) and set CXX=g++-12.")
elseif(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 15)
  message(FATAL_ERROR "kvxfer needs clang 15 or newer, found ${CMAKE_CXX_COMPILER} "
                      "${CMAKE_CXX_COMPILER_VERSION}.")
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_SKIP_RPATH ON)
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
# What sanitizers run: with assertions, with line numbers, and quick to compile.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O1 -g1")

add_library(kvxfer_flags INTERFACE)
target_compile_options(kvxfer_flags INTERFACE
  -Wall -Wextra -Wpedantic $<$<BOOL:${KVXFER_WERROR}>:-Werror>
  # A product and a sum stay two roundings: codecs give the same bytes on every machine.
  -ffp-contract=off
  # No path of the machine that built it ends up in the binary.
  "-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=")

# g++ 12 takes "literal" + std::string for an overlapping copy (GCC bug 105651), and the growth of an
# inlined vector for an overflow.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(kvxfer_flags INTERFACE -Wno-restrict -Wno-stringop-overflow)
endif()

if(KVXFER_SANITIZE)
  if(NOT KVXFER_SANITIZE MATCHES "^(thread|address|undefined|address,undefined)$")
    message(FATAL_ERROR "KVXFER_SANITIZE=${KVXFER_SANITIZE}: must be empty, thread, address, "
                        "undefined or address,undefined")
  endif()
  target_compile_options(kvxfer_flags INTERFACE
    "-fsanitize=${KVXFER_SANITIZE}" -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(kvxfer_flags INTERFACE "-fsanitize=${KVXFER_SANITIZE}")
endif()
