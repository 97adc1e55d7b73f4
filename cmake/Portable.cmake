# Links libshoestring.so with symbol versions of glibc 2.28 and of the libstdc++ of GCC 8, the floors of PyTorch's own
# wheels, on a build machine with newer ones. A linker takes the newest version of each symbol that the build machine
# has, and a library then fails to load on an older system, although the older symbol would do.
#
# old_symbols.cpp has the replacements, and the linker option --wrap sends references there. `make wheel` fails if the
# library refers to a newer symbol that has no replacement; `auditwheel show` names it.
set(SHOESTRING_OLD_SYMBOLS
    exp log pow fstat stat pthread_cond_clockwait pthread_sigmask pthread_mutex_trylock dlopen dlsym dlclose
    _ZSt28__throw_bad_array_new_lengthv
    _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE
    _ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv
    _ZNSt7__cxx1119basic_istringstreamIcSt11char_traitsIcESaIcEEC1EONS_12basic_stringIcS2_S3_EESt13_Ios_Openmode)

function(shoestring_portable target)
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" OR NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    message(FATAL_ERROR "SHOESTRING_PORTABLE=ON needs g++ on x86-64; leave SHOESTRING_PORTABLE out")
  endif()
  target_sources(${target} PRIVATE cmake/old_symbols.cpp)
  set_source_files_properties(cmake/old_symbols.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  foreach(_symbol IN LISTS SHOESTRING_OLD_SYMBOLS)
    target_link_options(${target} PRIVATE "-Wl,--wrap=${_symbol}")
  endforeach()

  # libstdc++ has std::to_chars of floating-point numbers since GCC 11. It keeps no state, so its object file from
  # the static libstdc++ is linked; everything else comes from the shared libstdc++, as in LibTorch.
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.a OUTPUT_VARIABLE _archive
                  OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(_folder "${CMAKE_BINARY_DIR}/portable")
  if(NOT EXISTS "${_folder}/libto_chars.a")
    file(MAKE_DIRECTORY "${_folder}")
    execute_process(COMMAND ${CMAKE_AR} x "${_archive}" floating_to_chars.o WORKING_DIRECTORY "${_folder}" ERROR_QUIET)
    execute_process(COMMAND ${CMAKE_AR} rcs libto_chars.a floating_to_chars.o WORKING_DIRECTORY "${_folder}"
                    ERROR_QUIET)
  endif()
  if(EXISTS "${_folder}/floating_to_chars.o")
    target_link_libraries(${target} PRIVATE "${_folder}/libto_chars.a")
    target_link_options(${target} PRIVATE "-Wl,--exclude-libs,libto_chars.a")
  endif()
endfunction()
