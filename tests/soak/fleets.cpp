#include "tests/soak/fleets.h"

#include <filesystem>

#include <fmt/format.h>

#include "tests/support/daemon/fleets.h"

namespace bulkhead::soak {
namespace {

constexpr const char* nvml = BULKHEAD_BINARY_DIR "/lib/libbulkhead_fake_nvml.so";
// tests/fakes/fake_cuda/README.md.
constexpr const char* fake_cuda_gpu = "GPU-fa4e0000-0000-4000-8000-000000000001";

std::string environment(const std::string& kind, const test::TemporaryFolder& machine) {
    return kind == "gpu-slabs"
               ? fmt::format("MINIMAL_GPU_SLABS: \"1\", MINIMAL_ENV_BULKHEAD_LIBCUDA: {}", fake_cuda)
               : fmt::format("MINIMAL_GPU_HELD_IN: {}, MINIMAL_GPU_BYTES: \"{}\"",
                             (machine.path() / "held").string(), gpu_bytes_each);
}

}  // namespace

SoakFleet make_fleet(const std::string& kind, int models, const std::string& channel) {
    SoakFleet fleet;
    const std::string limits = channel.empty() ? "" : "channel: {" + channel + "}\n";
    if (kind == "minimal-gpu" || kind == "gpu-slabs") {
        fleet.gpu = std::make_unique<test::TemporaryFolder>();
        const auto held = fleet.gpu->path() / "held";
        std::filesystem::create_directory(held);
        fleet.options.environment["BULKHEAD_NVML"] = nvml;
        fleet.options.environment["BULKHEAD_FAKE_NVML"] =
            fleet.gpu->write("machine", fmt::format("gpu {} 80000000000 Fake A\nheld_in 0 {}\n", fake_cuda_gpu,
                                                    held.string()));
    }
    fleet.yaml = test::fleet({});
    for (int i = 0; i < models; ++i) {
        const std::string name = "m" + std::to_string(i);
        if (fleet.gpu) {
            fleet.yaml += test::minimal_model(name, environment(kind, *fleet.gpu), "device: cuda:0\n" + limits);
        } else if (kind == "minimal") {
            fleet.yaml += test::minimal_model(name, {}, limits);
        } else {
            std::string model = test::silero_vad(limits);
            fleet.yaml += model.replace(model.find("silero-vad"), 10, name);
        }
    }
    if (kind != "real") fleet.options.programs = test::minimal_programs();
    return fleet;
}

std::optional<std::int64_t> gpu_bytes_in_use(const test::Daemon& daemon) {
    const auto status = daemon.call("gpu.status");
    if (!status || !status->at("nvml").as_bool()) return std::nullopt;
    std::int64_t bytes = 0;
    for (const auto& gpu : status->at("gpus").as_array()) {
        if (gpu.at("free_bytes").is_null()) return std::nullopt;
        bytes += gpu.at("total_bytes").to_number<std::int64_t>() - gpu.at("free_bytes").to_number<std::int64_t>();
    }
    return bytes;
}

}  // namespace bulkhead::soak
