#include <string_view>

#include <gtest/gtest.h>

#include "tests/gpu/slabs/cuda_peer.h"

int main(int argc, char** argv) {
    if (argc == 2 && std::string_view{argv[1]} == "--cuda-peer") return bulkhead::test::CudaPeer::run();
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
