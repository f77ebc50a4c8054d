#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/process.h"

namespace bulkhead::soak {

/// A fleet of models "m0", "m1" … of one kind, and the programs that serve it.
///
///   minimal      the minimal worker
///   minimal-gpu  it on GPU 0 of a fake NVML, where each process has `gpu_bytes_each` for as
///                long as it lives
///   gpu-slabs    it on the GPU of the fake driver, echoing there; clients need `fake_cuda` as
///                their BULKHEAD_LIBCUDA
///   real         silero-vad
///
/// `channel` is the inside of each model's YAML map of that name.
struct SoakFleet {
    std::string yaml;
    test::SpawnOptions options;
    std::unique_ptr<test::TemporaryFolder> gpu;  ///< the fake's machine; null without one
};
[[nodiscard]] SoakFleet make_fleet(const std::string& kind, int models, const std::string& channel = {});

inline constexpr const char* fake_cuda = BULKHEAD_BINARY_DIR "/lib/libbulkhead_fake_cuda.so";
inline constexpr std::int64_t gpu_bytes_each = 1'000'000;

/// What is in use of all GPUs, as the daemon tells it; empty when it does not.
[[nodiscard]] std::optional<std::int64_t> gpu_bytes_in_use(const test::Daemon& daemon);

}  // namespace bulkhead::soak
