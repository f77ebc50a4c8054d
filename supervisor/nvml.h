#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ipc/error.h"

namespace bulkhead::supervisor {

struct GpuProcess {
    std::int64_t pid = 0;
    std::optional<std::uint64_t> bytes;  ///< empty where the driver does not tell
};

struct Gpu {
    unsigned index = 0;
    std::string uuid;  ///< "GPU-…"
    std::string name;
    std::uint64_t total_bytes = 0;
    std::uint64_t free_bytes = 0;
    std::vector<GpuProcess> processes;
};

/// The driver's management library, loaded at run time: it creates no CUDA context, so it costs no device
/// memory and survives what a worker does to its device.
///
/// Thread  any one at a time; calls may block for as long as the driver does, so never on the loop
class Nvml {
public:
    /// `$BULKHEAD_NVML`, else libnvidia-ml.so.1.
    static Result<std::unique_ptr<Nvml>> open();
    ~Nvml();
    Nvml(const Nvml&) = delete;
    Nvml& operator=(const Nvml&) = delete;

    /// Every GPU with its memory and compute processes, as of now. One that answers with an error is left out.
    [[nodiscard]] std::vector<Gpu> gpus() const;

private:
    struct Functions;
    Nvml(void* library, std::unique_ptr<Functions> functions);

    void* library_;
    std::unique_ptr<Functions> functions_;
};

}  // namespace bulkhead::supervisor
