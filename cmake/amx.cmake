# Build without AMX where the compiler miscompiles it (check_amx.cpp). Call after upstream's targets exist.
function(ridge_check_amx)
    if (NOT GGML_NATIVE OR NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" OR CMAKE_CROSSCOMPILING)
        return()
    endif()
    if (NOT DEFINED RIDGE_AMX_RUNS)
        try_run(RIDGE_AMX_RUNS RIDGE_AMX_COMPILES
            "${CMAKE_BINARY_DIR}/check_amx" "${CMAKE_CURRENT_SOURCE_DIR}/cmake/check_amx.cpp"
            COMPILE_DEFINITIONS -O3 -march=native)
    endif()
    # a processor without AMX does not compile the check
    if (RIDGE_AMX_COMPILES AND NOT RIDGE_AMX_RUNS EQUAL 0)
        message(STATUS "ridgefill: ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} miscompiles AMX tile set-up; building without AMX")
        target_compile_options(ggml-cpu PRIVATE -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
    endif()
endfunction()
