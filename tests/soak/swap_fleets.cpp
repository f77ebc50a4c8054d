#include "tests/soak/swap_fleets.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <sstream>

#include <fmt/format.h>

#include "tests/support/daemon/fleets.h"
#include "tests/support/daemon/generation.h"
#include "tests/support/file_text.h"

namespace bulkhead::soak {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t gib = 1 << 30;

Result<> outcome(const Result<Reply>& reply) { return reply ? Result<>{} : reply.error(); }

Result<> echo(Channel& channel) { return outcome(test::infer_float(channel, "x", test::four, test::dims_four)); }

Result<> listen(Channel& channel) {
    const std::vector<float> chunk(512);
    return outcome(test::infer_float(channel, "x", chunk, std::array<std::int64_t, 2>{1, 512}, {{"sr", 16000}}));
}

Result<> embed(Channel& channel) {
    const std::array<std::int64_t, 2> dims{1, 16};
    auto ids = channel.allocate(wire::DType::int64, dims);
    if (!ids) return ids.error();
    auto mask = channel.allocate(wire::DType::int64, dims);
    if (!mask) return mask.error();
    std::ranges::fill(ids->as<std::int64_t>(), 7);
    std::ranges::fill(mask->as<std::int64_t>(), 1);
    const std::array<NamedInput, 2> inputs{{{"input_ids", &*ids}, {"attention_mask", &*mask}}};
    return outcome(channel.infer({.inputs = inputs}));
}

Result<> generate(Channel& channel) {
    const auto answered = test::generate(channel, test::prompt(3), test::greedy(8));
    return answered.error ? *answered.error : Result<>{};
}

/// Anonymous and shared memory of all workers of this keeper but the leaky one's, by the kernel.
std::uint64_t host_bytes(pid_t keeper) {
    std::istringstream children{test::file_text(fmt::format("/proc/{0}/task/{0}/children", keeper))};
    std::uint64_t kib = 0;
    for (std::string pid; children >> pid;) {
        const std::string environment = test::file_text("/proc/" + pid + "/environ");
        const bool is_worker = environment.find("BULKHEAD_WORKER=") != std::string::npos;
        if (!is_worker || environment.find(":leaky/") != std::string::npos) continue;
        const std::string status = test::file_text("/proc/" + pid + "/status");
        for (const std::string_view part : {"RssAnon:", "RssShmem:"})
            if (const std::size_t at = status.find(part); at != std::string::npos)
                kib += std::stoull(status.substr(at + part.size()));
    }
    return kib * 1024;
}

SwapFleet minimal_models() {
    SwapFleet fleet;
    for (const char* name : {"a", "b", "c"})
        fleet.models.push_back({name,
                                test::minimal_model(name, fmt::format("MINIMAL_BALLAST_BYTES: \"{}\"", 100 * mib),
                                                    "memory: 110MiB\nmin_resident: 100ms\n"),
                                echo});
    fleet.yaml = test::minimal_model("leaky", "EVIL_RUN: leak", "memory: 8MiB\nrestart: never\n");
    fleet.devices.push_back({"cpu", 165 * mib, host_bytes});
    fleet.options = test::minimal();
    return fleet;
}

SwapFleet real_models() {
    SwapFleet fleet;
    fleet.models = {{"silero-vad", test::silero_vad("memory: 95MiB\nmin_resident: 100ms\n"), listen},
                    {"minilm", test::minilm("memory: 180MiB\nmin_resident: 100ms\n"), embed},
                    {"smollm2",
                     test::generating("smollm2", test::model_file("smollm2"),
                                      "min_resident: 100ms\ngenerate: {slots: 1, length: 512}\n"),
                     generate}};
    fleet.yaml = test::evil_model("leaky", "", "leak", "memory: 100MiB\nrestart: never\n");
    fleet.devices.push_back({"cpu", 640 * mib, host_bytes});
    return fleet;
}

/// GPU 0 of 8 GiB and GPU 1 of 24, where 1 GiB each is kept free. What a process has of one is the
/// text of its file.
SwapFleet models_on_two_gpus() {
    SwapFleet fleet;
    fleet.gpus = std::make_unique<test::TemporaryFolder>();
    std::string machine;
    std::string limits;
    for (const auto& [index, size] : {std::pair{0, 8 * gib}, {1, 24 * gib}}) {
        const fs::path held = fleet.gpus->path() / fmt::format("GPU-{}", index);
        fs::create_directory(held);
        machine += fmt::format("gpu GPU-{} {} Fake\nheld_in {} {}\n", index, size, index, held.string());
        limits += fmt::format("{}'cuda:{}': {{margin: 1GiB}}", limits.empty() ? "" : ", ", index);
        fleet.devices.push_back(
            {fmt::format("cuda:{}", index), size - gib, [held](pid_t) {
                 std::uint64_t bytes = 0;
                 std::error_code gone;
                 for (fs::directory_iterator file{held, gone}, end; !gone && file != end; file.increment(gone)) {
                     const std::string pid = file->path().filename();
                     if (pid.find_first_not_of("0123456789") == std::string::npos && test::is_alive(std::stoi(pid)))
                         bytes += std::strtoull(test::file_text(file->path()).c_str(), nullptr, 10);
                 }
                 return bytes;
             }});
    }
    for (const auto& [name, size] : {std::pair{"a", 6}, {"b", 7}, {"c", 20}})
        fleet.models.push_back(
            {name,
             test::minimal_model(
                 name,
                 fmt::format("MINIMAL_GPU_HELD_IN: {}, MINIMAL_GPU_BYTES: \"{}\", MINIMAL_GPU_CONTEXT: \"{}\"",
                             fleet.gpus->path().string(), static_cast<std::uint64_t>(size) * gib, 300 * mib),
                 fmt::format("memory: {}GiB\nmin_resident: 100ms\ndevice: ['cuda:0', 'cuda:1']\n", size)),
             echo});
    fleet.yaml = "limits: {" + limits + "}\nblanks: {'cuda:0': 1, 'cuda:1': 1}\n";
    fleet.options = test::minimal();
    fleet.options.environment["BULKHEAD_NVML"] = BULKHEAD_BINARY_DIR "/lib/libbulkhead_fake_nvml.so";
    fleet.options.environment["BULKHEAD_FAKE_NVML"] = fleet.gpus->write("machine", machine);
    return fleet;
}

}  // namespace

SwapFleet make_swap_fleet(const std::string& kind) {
    SwapFleet fleet = kind == "real" ? real_models() : kind == "minimal-gpu" ? models_on_two_gpus() : minimal_models();
    fleet.has_leaky = !fleet.gpus;
    if (fleet.has_leaky)
        fleet.yaml += fmt::format("limits: {{cpu: {{share: {}MiB}}}}\n", fleet.devices.front().limit / mib);
    std::string models;
    for (const SwapModel& model : fleet.models) models += model.yaml;
    fleet.yaml = test::fleet({models}) + fleet.yaml;
    return fleet;
}

}  // namespace bulkhead::soak
