# surogate_place(<target> <folder below surogate_core>): where a native file ends up, in a wheel or in a working copy.
function(surogate_place target folder)
  if(SUROGATE_IN_SOURCE_TREE)
    set_target_properties(${target} PROPERTIES
      LIBRARY_OUTPUT_DIRECTORY "${SUROGATE_PACKAGE_DIR}/${folder}"
      BUILD_WITH_INSTALL_RPATH ON)
  else()
    install(TARGETS ${target} LIBRARY DESTINATION "surogate_core/${folder}")
  endif()
endfunction()
