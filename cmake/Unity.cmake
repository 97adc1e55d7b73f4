# Unity builds: all sources of a room (a folder of csrc) form one translation unit. LibTorch's headers are
# then read once per room instead of once per file. Names in anonymous namespaces must therefore be unique
# within a room, and within the readers.

# Sources that read files. They form a separate unit, because tests/fuzz compiles them with sanitizers and
# links the library's other objects.
set(SHOESTRING_READERS
    files/read_file files/safetensors files/safetensors_files files/safetensors_header
    integrations/model_files integrations/quantized_keys adapters/config_digest adapters/load adapters/names
    adapters/pattern adapters/pattern_syntax adapters/peft_config optim/files optim/saved)

# Assigns each source (absolute path) to the unit of its room, or to the unit of the readers.
function(shoestring_unity target)
  if(NOT SHOESTRING_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  foreach(_source IN LISTS ARGN)
    file(RELATIVE_PATH _file "${PROJECT_SOURCE_DIR}/csrc" "${_source}")
    string(REGEX REPLACE "[.]cpp$" "" _file "${_file}")
    get_filename_component(_unit "${_file}" DIRECTORY)
    if(_file IN_LIST SHOESTRING_READERS)
      set(_unit readers)
    endif()
    set_source_files_properties("${_source}" PROPERTIES UNITY_GROUP "${_unit}")
  endforeach()
endfunction()
