# Unity builds: all sources of a folder of csrc or tests/cpp are compiled as one translation unit, so
# LibTorch's headers are read once per folder instead of once per file. The sources in SHOESTRING_READERS form
# a unit of their own. Names in anonymous namespaces must therefore be unique within each unit.

# Sources that read files. They form a translation unit of their own, because tests/fuzz compiles it with
# sanitizers and links it with the library's remaining object files.
set(SHOESTRING_READERS
    files/read_file files/safetensors files/safetensors_files files/safetensors_header
    integrations/model_files integrations/quantized_keys adapters/config_digest adapters/load adapters/names
    adapters/pattern adapters/pattern_syntax adapters/peft_config adapters/virtual_tokens optim/files optim/saved)

# Assigns each source file (absolute path) of a target to the translation unit of its folder, or to the unit
# of SHOESTRING_READERS.
function(shoestring_unity target)
  if(NOT SHOESTRING_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  foreach(_source IN LISTS ARGN)
    file(RELATIVE_PATH _file "${PROJECT_SOURCE_DIR}" "${_source}")
    string(REGEX REPLACE "^(csrc|tests/cpp)/|[.]cpp$" "" _file "${_file}")
    get_filename_component(_unit "${_file}" DIRECTORY)
    if(_file IN_LIST SHOESTRING_READERS)
      set(_unit readers)
    endif()
    set_source_files_properties("${_source}" PROPERTIES UNITY_GROUP "${_unit}")
  endforeach()
endfunction()
