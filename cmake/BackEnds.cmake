# kvxfer_back_end(<name> [UNAVAILABLE <reason> | REASON <text>])
#
# Resolves the option KVXFER_WITH_<NAME> = auto | on | off and sets, in the caller's scope,
# KVXFER_<NAME>_STATE to "on" or "off" and KVXFER_<NAME>_REASON to why. A back end that was asked for
# with `on` and can't be had ends the configuration: a build must never lack silently what it was told
# to have.
function(kvxfer_back_end name)
  cmake_parse_arguments(ARG "" "UNAVAILABLE;REASON" "" ${ARGN})
  string(TOLOWER "${name}" lower)
  set(option "KVXFER_WITH_${name}")
  set(${option} "auto" CACHE STRING "Build with ${lower}: auto, on or off")
  set_property(CACHE ${option} PROPERTY STRINGS auto on off)
  string(TOLOWER "${${option}}" asked)

  if(asked STREQUAL "off")
    set(state "off")
    set(reason "switched off by ${option}=off")
  elseif(NOT asked MATCHES "^(auto|on)$")
    message(FATAL_ERROR "${option}=${${option}}: must be auto, on or off")
  elseif(ARG_UNAVAILABLE)
    if(asked STREQUAL "on")
      message(FATAL_ERROR "${option}=on can't be had: ${ARG_UNAVAILABLE}. "
                          "Set ${option}=auto or off to build without ${lower}.")
    endif()
    set(state "off")
    set(reason "${ARG_UNAVAILABLE}")
  else()
    set(state "on")
    set(reason "found")
    if(ARG_REASON)
      set(reason "${ARG_REASON}")
    endif()
  endif()

  message(STATUS "${lower}: ${state} (${reason})")
  set(KVXFER_${name}_STATE "${state}" PARENT_SCOPE)
  set(KVXFER_${name}_REASON "${reason}" PARENT_SCOPE)
endfunction()
