#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace bulkhead::test {

/// What NVML says of the first GPU, asked without a CUDA context: the tests' own witness.
class Nvml {
public:
    /// Why there is no GPU to test on; empty when there is one. Never blocks on a driver
    /// that is not there.
    [[nodiscard]] static std::optional<std::string> why_no_gpu();

    [[nodiscard]] static std::uint64_t free_bytes();
    [[nodiscard]] static std::uint64_t total_bytes();
    /// Pids that hold a context on the GPU, as far as NVML sees this pid namespace.
    [[nodiscard]] static std::vector<pid_t> processes();
};

}  // namespace bulkhead::test

/// Reports the test as skipped, with the reason, where there is no GPU.
#define SKIP_WITHOUT_GPU()                                                                                             \
    if (const auto reason = bulkhead::test::Nvml::why_no_gpu()) GTEST_SKIP() << *reason
