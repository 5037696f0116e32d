# What `pip install .` puts into the Python package: programs and shared libraries side by side in ridgefill/bin.

# all shared libraries that upstream's directories define, backends of an accelerator included
function(ridge_shared_libraries dir out)
    get_property(_targets DIRECTORY "${dir}" PROPERTY BUILDSYSTEM_TARGETS)
    get_property(_subdirs DIRECTORY "${dir}" PROPERTY SUBDIRECTORIES)
    set(_found ${${out}})
    foreach(t IN LISTS _targets)
        get_target_property(_type ${t} TYPE)
        if (_type MATCHES "^(SHARED|MODULE)_LIBRARY$")
            list(APPEND _found ${t})
        endif()
    endforeach()
    foreach(d IN LISTS _subdirs)
        ridge_shared_libraries("${d}" _found)
    endforeach()
    set(${out} ${_found} PARENT_SCOPE)
endfunction()

set(RIDGE_LIBRARIES "")
ridge_shared_libraries("${CMAKE_SOURCE_DIR}" RIDGE_LIBRARIES)

foreach(t IN LISTS RIDGE_LIBRARIES RIDGE_TARGETS)
    # a wheel holds no symbolic links: one file per library, named as the others ask for it
    set_property(TARGET ${t} PROPERTY VERSION)
    set_property(TARGET ${t} PROPERTY SOVERSION)
    set_property(TARGET ${t} PROPERTY PUBLIC_HEADER) # nobody compiles against the package
    if (APPLE)
        set_property(TARGET ${t} PROPERTY INSTALL_RPATH "@loader_path")
    else()
        set_property(TARGET ${t} PROPERTY INSTALL_RPATH "$ORIGIN")
    endif()
    # OPTIONAL: upstream defines libraries that our programs do not need and this build does not make
    install(TARGETS ${t} OPTIONAL
        RUNTIME DESTINATION ridgefill/bin COMPONENT ridgefill
        LIBRARY DESTINATION ridgefill/bin COMPONENT ridgefill)
endforeach()
