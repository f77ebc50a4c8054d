#pragma once

#include <cstdlib>
#include <string>

#include <fmt/format.h>

#include "ipc/cuda/gpu.h"
#include "tests/gpu/slabs/on_gpu.h"
#include "tests/support/build_folder.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::test {

/// Of the fake driver's machine, beside the one that is used.
inline constexpr const char* other_gpu = "GPU-0badf00d-0000-4000-8000-000000000002";

/// How a daemon is started whose worker echoes on `gpu` by the driver's own copies: on the fake
/// driver with the fake NVML beside it, which reports two GPUs.
struct GpuEchoDaemon {
    explicit GpuEchoDaemon(const cuda::Gpu& gpu) : uuid{cuda::to_string(gpu.uuid())} {
        options.programs = minimal_programs();
        if (!is_fake_cuda()) return;
        options.environment["BULKHEAD_NVML"] = (build_folder() / "lib/libbulkhead_fake_nvml.so").string();
        options.environment["BULKHEAD_FAKE_NVML"] = folder.write(
            "machine", fmt::format("gpu {} 80000000000 Fake A\ngpu {} 80000000000 Fake B\n", uuid, other_gpu));
        worker_environment += fmt::format(", MINIMAL_ENV_BULKHEAD_LIBCUDA: {}", std::getenv("BULKHEAD_LIBCUDA"));
        worker_environment += fmt::format(", MINIMAL_ENV_BULKHEAD_FAKE_CUDA_GPUS: \"{},{}\"", uuid, other_gpu);
    }

    /// A fleet of this one model; `extra` is YAML for it.
    [[nodiscard]] std::string fleet_of(const std::string& model, const std::string& extra = {},
                                       const std::string& device = {}) const {
        return fleet({minimal_model(model, worker_environment,
                                    "device: " + (device.empty() ? uuid : device) + "\n" + extra)});
    }

    std::string uuid;
    TemporaryFolder folder;
    SpawnOptions options;
    std::string worker_environment = "MINIMAL_GPU_SLABS: \"1\"";
};

}  // namespace bulkhead::test
