#include "tests/soak/fleets.h"

#include <filesystem>

#include <fmt/format.h>

#include "tests/integration/fixture/fleets.h"

namespace bulkhead::soak {
namespace {

constexpr const char* nvml = BULKHEAD_BINARY_DIR "/lib/libbulkhead_fake_nvml.so";

std::string gpu_model(const std::string& name, const test::TemporaryFolder& machine) {
    return test::minimal_model(name,
                               fmt::format("MINIMAL_GPU_HELD_IN: {}, MINIMAL_GPU_BYTES: \"{}\"",
                                           (machine.path() / "held").string(), gpu_bytes_each),
                               "device: cuda:0\n");
}

}  // namespace

SoakFleet make_fleet(const std::string& kind, int models) {
    SoakFleet fleet;
    if (kind == "minimal-gpu") {
        fleet.gpu = std::make_unique<test::TemporaryFolder>();
        const auto held = fleet.gpu->path() / "held";
        std::filesystem::create_directory(held);
        fleet.options.environment["BULKHEAD_NVML"] = nvml;
        fleet.options.environment["BULKHEAD_FAKE_NVML"] =
            fleet.gpu->write("machine", fmt::format("gpu GPU-a 80000000000 Fake A\nheld_in 0 {}\n", held.string()));
    }
    fleet.yaml = test::fleet({});
    for (int i = 0; i < models; ++i) {
        const std::string name = "m" + std::to_string(i);
        if (fleet.gpu) {
            fleet.yaml += gpu_model(name, *fleet.gpu);
        } else if (kind == "minimal") {
            fleet.yaml += test::minimal_model(name);
        } else {
            std::string model = test::silero_vad();
            fleet.yaml += model.replace(model.find("silero-vad"), 10, name);
        }
    }
    if (kind != "silero-vad") fleet.options.programs = test::minimal_programs();
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
