#include "worker/generation/models/fit.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ipc/base/machine_memory.h"
#include "ipc/base/own_cgroup.h"
#include "ipc/channel/dtype.h"

namespace bulkhead::worker::generation {
namespace {

namespace fs = std::filesystem;

/// Minimum for logits, intermediate results and LibTorch's own memory, which else is a
/// share of the KV.
constexpr std::uint64_t step_bytes = 64ULL << 20;

std::string contents(const char* path) {
    std::ifstream file{path};
    return {std::istreambuf_iterator<char>{file}, {}};
}

/// "8192 MiB of weights and 4096 MiB of KV (4 slots of 8192 positions, bfloat16)". Mapped weights
/// need no memory of their own: they count 0.
std::string wanted(const Manifest& manifest, std::uint64_t weights_bytes) {
    return fmt::format("{}{} MiB of KV ({} slots of {} positions, {})",
                       weights_bytes > 0 ? fmt::format("{} MiB of weights and ", weights_bytes >> 20) : "",
                       kv_bytes(manifest) >> 20, manifest.shape.slots, manifest.shape.length,
                       to_string(manifest.kv_dtype));
}

constexpr std::uint64_t unlimited = std::numeric_limits<std::uint64_t>::max();

/// A cgroup version's names. In version 1, memory.stat counts child folders under other names.
struct Version {
    std::string_view controller;
    const char* limit;
    const char* used;
    std::string_view active_file;
    std::string_view inactive_file;
};
constexpr Version versions[] = {
    {"", "memory.max", "memory.current", "active_file", "inactive_file"},
    {"memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file"},
};

/// Returns `otherwise` if the file is missing or holds no number ("max").
std::uint64_t read_number(const fs::path& path, std::uint64_t otherwise) {
    std::ifstream file{path};
    std::uint64_t value = 0;
    return file >> value ? value : otherwise;
}

std::uint64_t page_cache(const fs::path& folder, const Version& version) {
    std::ifstream file{folder / "memory.stat"};
    std::uint64_t bytes = 0;
    std::string name;
    for (std::uint64_t value = 0; file >> name >> value;)
        if (name == version.active_file || name == version.inactive_file) bytes += value;
    return bytes;
}

std::uint64_t room_in(const fs::path& folder, const Version& version) {
    const std::uint64_t limit = read_number(folder / version.limit, unlimited);
    if (limit == unlimited) return unlimited;
    const std::uint64_t used = read_number(folder / version.used, 0);
    const std::uint64_t kept = used - std::min(used, page_cache(folder, version));
    return limit - std::min(limit, kept);
}

}  // namespace

std::uint64_t kv_bytes(const Manifest& manifest) {
    return manifest.kv_bytes_per_position() * manifest.shape.length * manifest.shape.slots;
}

Result<> check_fit(const Manifest& manifest, std::uint64_t weights_bytes, std::uint64_t free_bytes,
                   const std::string& where) {
    const Shape& shape = manifest.shape;
    const std::uint64_t kv = kv_bytes(manifest);
    const std::uint64_t fixed = weights_bytes + step_bytes;
    if (free_bytes >= fixed && free_bytes - fixed >= kv) return {};

    Error error{
        ErrorCode::out_of_memory,
        fmt::format("making room {}: {}, {} MiB are free", where, wanted(manifest, weights_bytes), free_bytes >> 20),
        {}};
    const std::uint64_t left = free_bytes > fixed ? free_bytes - fixed : 0;
    const std::uint64_t position = manifest.kv_bytes_per_position();
    std::vector<std::string> ways;
    if (const std::uint64_t slots = left / (position * shape.length); slots > 0)
        ways.push_back(fmt::format("generate.slots: {}", slots));
    if (const std::uint64_t length = left / (position * shape.slots) / 64 * 64; length > 0)
        ways.push_back(fmt::format("generate.length: {}", std::min<std::uint64_t>(length, shape.length)));
    if (shape.slots > 1)
        if (const std::uint64_t length = left / position / 64 * 64; length > 0 && length < shape.length)
            ways.push_back(fmt::format("generate.slots: 1 with generate.length: {}", length));
    if (manifest.kv_dtype == wire::DType::float32 && kv / 2 <= left)
        ways.emplace_back("an export with --kv-dtype bfloat16");
    error.remedy = ways.empty() ? fmt::format("unload another model, or {} with a smaller dtype", export_again)
                                : fmt::format("what would fit: {}; or unload another model", fmt::join(ways, ", or "));
    return error;
}

Error say_what_leaves_more(Error error, const Manifest& manifest, std::uint64_t weights_bytes,
                           std::uint64_t free_bytes) {
    if (error.code != ErrorCode::out_of_memory) return error;
    const Shape& shape = manifest.shape;
    const std::uint64_t kv = kv_bytes(manifest);
    error.attempt += fmt::format("; of {} MiB that were free, it asks for {}, and {} take more", free_bytes >> 20,
                                 wanted(manifest, weights_bytes),
                                 manifest.device == "cuda" ? "steps, their graphs and a long prompt" : "steps");
    const auto more = [](std::uint64_t bytes) { return fmt::format("leaves {} MiB more", bytes >> 20); };
    std::vector<std::string> ways;
    if (shape.slots > 1) {
        const std::uint32_t slots = shape.slots / 2;
        ways.push_back(fmt::format("generate.slots: {} {}", slots, more(kv / shape.slots * (shape.slots - slots))));
    }
    if (const std::uint32_t length = shape.length / 2 / 64 * 64; length > 0)
        ways.push_back(
            fmt::format("generate.length: {} {}", length, more(kv / shape.length * (shape.length - length))));
    if (manifest.kv_dtype == wire::DType::float32)
        ways.push_back(fmt::format("an export with --kv-dtype bfloat16 {}", more(kv / 2)));
    if (manifest.device == "cuda" && shape.buckets.size() > 1)
        ways.emplace_back("fewer generate.buckets need fewer graphs");
    if (manifest.device == "cuda") ways.emplace_back("a smaller generate.prefill_chunk needs less for a long prompt");
    ways.emplace_back("unload another model");
    error.remedy = fmt::format("{}", fmt::join(ways, "; or "));
    return error;
}

std::uint64_t cgroup_room(std::string_view mountinfo, std::string_view cgroup) {
    std::uint64_t room = unlimited;
    for (const Version& version : versions)
        if (const auto own = own_cgroup(mountinfo, cgroup, version.controller))
            for (fs::path folder = *own; folder.has_relative_path(); folder = folder.parent_path())
                // Above the mount the file is missing.
                room = std::min(room, room_in(folder, version));
    return room;
}

std::uint64_t free_host_bytes() {
    const std::uint64_t room = cgroup_room(contents("/proc/self/mountinfo"), contents("/proc/self/cgroup"));
    const std::uint64_t available = read_machine_memory().available;
    return available > 0 ? std::min(available, room) : room;
}

}  // namespace bulkhead::worker::generation
