# Bring the pinned llama.cpp sources into the build tree, patched. Sets RIDGE_UPSTREAM_DIR.
#
# The tree is made anew when the pin, a patch or RIDGE_LLAMA_CPP_DIR changes, and left alone otherwise, so that an
# unchanged reconfigure rebuilds nothing.

file(STRINGS "${CMAKE_CURRENT_SOURCE_DIR}/llama.cpp/UPSTREAM" RIDGE_PIN REGEX "^[a-z]")
foreach(line IN LISTS RIDGE_PIN)
    string(REGEX MATCH "^([a-z0-9]+) +(.+)$" _ "${line}")
    set(RIDGE_PIN_${CMAKE_MATCH_1} "${CMAKE_MATCH_2}")
endforeach()

file(GLOB RIDGE_PATCHES CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/llama.cpp/patches/*.patch")
list(SORT RIDGE_PATCHES)
if (NOT RIDGE_PATCH)
    set(RIDGE_PATCHES "")
endif()
if (RIDGE_UPSTREAM_TESTS)
    file(GLOB RIDGE_TEST_PATCHES CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/tests/upstream/ctest/*.patch")
    list(SORT RIDGE_TEST_PATCHES)
    list(APPEND RIDGE_PATCHES ${RIDGE_TEST_PATCHES})
endif()

set(RIDGE_UPSTREAM_DIR "${CMAKE_BINARY_DIR}/upstream")

set(_key "${RIDGE_PIN_package} ${RIDGE_PIN_version} ${RIDGE_PIN_sha256} ${RIDGE_LLAMA_CPP_DIR}")
foreach(p IN LISTS RIDGE_PATCHES)
    file(SHA256 "${p}" _h)
    string(APPEND _key " ${_h}")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${p}")
endforeach()

function(ridge_fetch_upstream dst)
    set(_dl "${CMAKE_BINARY_DIR}/upstream-download")
    file(MAKE_DIRECTORY "${_dl}")
    file(WRITE "${_dl}/requirements.txt" "${RIDGE_PIN_package}==${RIDGE_PIN_version} --hash=sha256:${RIDGE_PIN_sha256}\n")
    file(GLOB _have "${_dl}/*.tar.gz")
    set(_sdist "")
    foreach(f IN LISTS _have)
        file(SHA256 "${f}" _h)
        if (_h STREQUAL RIDGE_PIN_sha256)
            set(_sdist "${f}")
        endif()
    endforeach()
    if (NOT _sdist)
        message(STATUS "ridgefill: fetching ${RIDGE_PIN_package} ${RIDGE_PIN_version} through pip")
        execute_process(
            COMMAND "${Python3_EXECUTABLE}" -m pip download --quiet --no-deps --no-binary :all: --require-hashes
                    -r "${_dl}/requirements.txt" -d "${_dl}"
            RESULT_VARIABLE _rc OUTPUT_VARIABLE _out ERROR_VARIABLE _out)
        if (NOT _rc EQUAL 0)
            message(FATAL_ERROR "ridgefill: pip could not fetch ${RIDGE_PIN_package}==${RIDGE_PIN_version} "
                                "(sha256 ${RIDGE_PIN_sha256}):\n${_out}")
        endif()
        file(GLOB _sdist "${_dl}/*.tar.gz")
    endif()
    file(ARCHIVE_EXTRACT INPUT "${_sdist}" DESTINATION "${_dl}/x" PATTERNS "*/${RIDGE_PIN_subdir}/*")
    file(GLOB _src "${_dl}/x/*/${RIDGE_PIN_subdir}")
    file(RENAME "${_src}" "${dst}")
    file(REMOVE_RECURSE "${_dl}/x")
endfunction()

# patch names the file and the number of the hunk that does not apply; no fuzz, and nothing is built from a half-patched tree
function(ridge_apply_patch dir patch_file)
    foreach(_dry --dry-run "")
        execute_process(
            COMMAND "${RIDGE_PATCH_PROGRAM}" -p1 --forward --fuzz=0 --batch --no-backup-if-mismatch ${_dry} -i "${patch_file}"
            WORKING_DIRECTORY "${dir}" RESULT_VARIABLE _rc OUTPUT_VARIABLE _out ERROR_VARIABLE _out)
        if (NOT _rc EQUAL 0)
            file(REMOVE_RECURSE "${dir}")
            file(RELATIVE_PATH _name "${CMAKE_CURRENT_SOURCE_DIR}" "${patch_file}")
            message(FATAL_ERROR "ridgefill: ${_name} does not apply to these llama.cpp sources:\n${_out}\n"
                                "The patch is made for ${RIDGE_PIN_package} ${RIDGE_PIN_version}.")
        endif()
    endforeach()
endfunction()

set(_stamp "${CMAKE_BINARY_DIR}/upstream.stamp")
set(_have "")
if (EXISTS "${_stamp}" AND EXISTS "${RIDGE_UPSTREAM_DIR}/CMakeLists.txt")
    file(READ "${_stamp}" _have)
endif()
if (NOT _have STREQUAL _key)
    set(_new "${CMAKE_BINARY_DIR}/upstream-new")
    file(REMOVE_RECURSE "${_new}")
    file(REMOVE "${_stamp}")
    if (RIDGE_LLAMA_CPP_DIR)
        if (NOT EXISTS "${RIDGE_LLAMA_CPP_DIR}/src/llama-graph.cpp")
            message(FATAL_ERROR "ridgefill: RIDGE_LLAMA_CPP_DIR=${RIDGE_LLAMA_CPP_DIR} holds no llama.cpp checkout "
                                "(expected src/llama-graph.cpp in it)")
        endif()
        # the user's own builds stay behind; upstream has files named build* further down
        file(GLOB _children "${RIDGE_LLAMA_CPP_DIR}/*" "${RIDGE_LLAMA_CPP_DIR}/.*")
        foreach(c IN LISTS _children)
            get_filename_component(_name "${c}" NAME)
            if (NOT _name STREQUAL ".git" AND NOT (_name MATCHES "^build" AND IS_DIRECTORY "${c}"))
                file(COPY "${c}" DESTINATION "${_new}")
            endif()
        endforeach()
    else()
        ridge_fetch_upstream("${_new}")
    endif()
    if (RIDGE_PATCHES)
        find_program(RIDGE_PATCH_PROGRAM patch)
        if (NOT RIDGE_PATCH_PROGRAM)
            message(FATAL_ERROR "ridgefill: the program 'patch' is needed (Debian: apt-get install patch)")
        endif()
    endif()
    foreach(p IN LISTS RIDGE_PATCHES)
        ridge_apply_patch("${_new}" "${p}")
    endforeach()
    # keep the time stamps of files that did not change, so that an edited patch rebuilds only what it touches
    execute_process(COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/cmake/sync_tree.py" "${_new}" "${RIDGE_UPSTREAM_DIR}"
                    RESULT_VARIABLE _rc)
    if (NOT _rc EQUAL 0)
        message(FATAL_ERROR "ridgefill: could not move the patched sources to ${RIDGE_UPSTREAM_DIR}")
    endif()
    file(WRITE "${_stamp}" "${_key}")
endif()
