# CPack runs this before it packs the installed files. It leaves $ORIGIN alone as the libraries' run-time search path:
# the folders of a Python environment beside it have no meaning below /usr.
file(GLOB_RECURSE _libraries "${CPACK_TEMPORARY_DIRECTORY}/*/libshoestring*.so")
foreach(_library IN LISTS _libraries)
  file(RPATH_SET FILE "${_library}" NEW_RPATH "$ORIGIN")
endforeach()
