#include <string_view>

#include <gtest/gtest.h>

#include "tests/gpu/slabs/cuda_peer.h"

#if defined(__SANITIZE_THREAD__)
/// A dead thread's storage in the fake driver, which is loaded at run time, is freed by the C
/// library when it uses the stack again: in order, but by a lock that the sanitizer does not see.
extern "C" const char* __tsan_default_suppressions() { return "race:_dl_deallocate_tls\n"; }
#endif

int main(int argc, char** argv) {
    if (argc == 2 && std::string_view{argv[1]} == "--cuda-peer") return bulkhead::test::CudaPeer::run();
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
