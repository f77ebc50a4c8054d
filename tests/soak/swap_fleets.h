#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/daemon/daemon.h"

namespace bulkhead::soak {

inline constexpr std::uint64_t mib = 1 << 20;

struct SwapModel {
    std::string name;
    std::string yaml;
    std::function<Result<>(Channel&)> ask;  ///< one request
};

/// A device that the models of a fleet share.
struct SwapDevice {
    std::string name;
    std::uint64_t limit = 0;                          ///< bytes
    std::function<std::uint64_t(pid_t keeper)> used;  ///< by this keeper's workers, but not by the
                                                      ///< one that leaks
};

/// Three models that do not fit together, and one that leaks when it is asked, where the
/// kernel can bound it.
struct SwapFleet {
    std::vector<SwapModel> models;
    std::vector<SwapDevice> devices;
    std::string yaml;
    bool has_leaky = false;
    test::SpawnOptions options;
    std::unique_ptr<test::TemporaryFolder> gpus;  ///< the fake's machine; null without one
};

/// `kind`  minimal: test models of 100 MiB on a limit of 165
///         real: silero-vad, MiniLM and SmolLM2 on a limit that holds the largest alone, or
///             the two others
///         minimal-gpu: test models, and blanks, on two GPUs of different sizes, those
///             of the fake NVML
[[nodiscard]] SwapFleet make_swap_fleet(const std::string& kind);

}  // namespace bulkhead::soak
