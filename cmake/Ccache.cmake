# Compiles through ccache if it is installed, so that a second clone of the repository finds the object files of the
# first one. Sets SHOESTRING_PREFIXES: the beginnings of file names that messages leave out.
#
# ccache compares command lines, so they must be equal from clone to clone. It passes each path below CCACHE_BASEDIR to
# the compiler relative to the folder in which Ninja runs it, and does not compare the values of -f*-prefix-map.
find_program(CCACHE_PROGRAM ccache)
set(_ccache FALSE)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER AND CMAKE_GENERATOR STREQUAL "Ninja")
  set(_ccache TRUE)
  # Precompiled headers need the sloppiness in macros and times, and -fpch-preprocess.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime "${CCACHE_PROGRAM}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  endif()
  message(STATUS "Object files: kept by ${CCACHE_PROGRAM}")
endif()

# The compiler takes the last prefix that fits, so LibTorch's folder, which may be below the source folder, is last.
set(SHOESTRING_PREFIXES "")
foreach(_folder "${PROJECT_SOURCE_DIR}" "${LibTorch_DIR}/include")
  string(FIND "${_folder}/" "${PROJECT_SOURCE_DIR}/" _at)
  if(_ccache AND _at EQUAL 0)
    file(RELATIVE_PATH _relative "${CMAKE_BINARY_DIR}" "${_folder}")
    string(REGEX REPLACE "/$" "" _relative "${_relative}")
    list(APPEND SHOESTRING_PREFIXES "${_relative}/")
  endif()
  list(APPEND SHOESTRING_PREFIXES "${_folder}/")
endforeach()
