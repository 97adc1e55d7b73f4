# Unity builds: sources are compiled together as translation units, so LibTorch's headers are read once per unit
# instead of once per file. Names in anonymous namespaces must therefore be unique within each unit.
#
# CMake's own UNITY_BUILD writes the absolute paths of the sources. These units name them relative to the repository, so
# ccache finds their object files in every clone.

# Sources that read files. They form a translation unit of their own, because tests/fuzz compiles it with
# sanitizers and links it with the library's remaining object files.
set(SHOESTRING_READERS
    files/read_file files/safetensors files/safetensors_files files/safetensors_header
    integrations/model_files integrations/quantized_keys adapters/config_digest adapters/config_fields adapters/load
    adapters/names adapters/pattern adapters/pattern_syntax adapters/peft_config adapters/virtual_tokens optim/core/files
    optim/core/saved planning/check planning/plan_json)

# Compiles source files of a target (absolute paths) as one translation unit: build/unity/TARGET/unity_NAME.cpp.
function(shoestring_unit target name)
  if(NOT SHOESTRING_UNITY)
    target_sources(${target} PRIVATE ${ARGN})
    return()
  endif()
  set(_includes "")
  foreach(_source IN LISTS ARGN)
    file(RELATIVE_PATH _source "${PROJECT_SOURCE_DIR}" "${_source}")
    string(APPEND _includes "#include \"${_source}\"\n")
  endforeach()
  set(_unit "${PROJECT_BINARY_DIR}/unity/${target}/unity_${name}.cpp")
  file(CONFIGURE OUTPUT "${_unit}" CONTENT "${_includes}" @ONLY)  # keeps an equal file, which is not compiled again
  target_sources(${target} PRIVATE "${_unit}")
  set_source_files_properties("${_unit}" PROPERTIES INCLUDE_DIRECTORIES "${PROJECT_SOURCE_DIR}")
endfunction()

# shoestring_unity(TARGET BASE SOURCE ... [TOGETHER ROOM_ROOM ...])
# Compiles source files (absolute paths) below the folder BASE: each of its folders ("rooms") as one translation unit,
# the sources in SHOESTRING_READERS as one more, and the rooms of each name after TOGETHER, joined by _, as one.
function(shoestring_unity target base)
  cmake_parse_arguments(PARSE_ARGV 2 _given "" "" "TOGETHER")
  foreach(_together IN LISTS _given_TOGETHER)
    string(REPLACE "_" ";" _rooms "${_together}")
    foreach(_room IN LISTS _rooms)
      set(_unit_of_${_room} ${_together})
    endforeach()
  endforeach()
  set(_units "")
  foreach(_source IN LISTS _given_UNPARSED_ARGUMENTS)
    file(RELATIVE_PATH _file "${PROJECT_SOURCE_DIR}/${base}" "${_source}")
    string(REGEX REPLACE "/.*" "" _unit "${_file}")
    if(DEFINED _unit_of_${_unit})
      set(_unit ${_unit_of_${_unit}})
    endif()
    string(REGEX REPLACE "[.]cpp$" "" _file "${_file}")
    if(_file IN_LIST SHOESTRING_READERS)
      set(_unit readers)
    endif()
    list(APPEND _units "${_unit}")
    list(APPEND _sources_of_${_unit} "${_source}")
  endforeach()
  list(REMOVE_DUPLICATES _units)
  foreach(_unit IN LISTS _units)
    shoestring_unit(${target} ${_unit} ${_sources_of_${_unit}})
  endforeach()
endfunction()
