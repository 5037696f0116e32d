# Upstream's own tests that concern what we patch. Only these are built: cmake --build DIR --target upstream-tests
set(RIDGE_UPSTREAM_TEST_TARGETS
    test-arg-parser
    test-batch-alloc
    test-llama-archs
    test-recurrent-state-rollback
    test-save-load-state
    test-state-restore-fragmented
    test-thread-safety)

add_custom_target(upstream-tests)
add_dependencies(upstream-tests ${RIDGE_UPSTREAM_TEST_TARGETS})

# upstream registers it only as the one that writes the models of other tests
enable_testing()
add_test(NAME test-llama-archs COMMAND test-llama-archs)
