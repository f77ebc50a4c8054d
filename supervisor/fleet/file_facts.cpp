#include "supervisor/fleet/file_facts.h"

#include <filesystem>

#include "supervisor/base/json_members.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/memory/limits.h"

namespace bulkhead::supervisor {
namespace {

/// Reads a figure from 1 to `max`.
std::optional<std::uint64_t> figure(const json::object& from, std::string_view key, std::uint64_t max) {
    const auto read = member<std::uint64_t>(from, key);
    return read && *read > 0 && *read <= max ? read : std::nullopt;
}

std::optional<std::uint64_t> element_bytes(const std::optional<std::string>& dtype) {
    if (dtype == "float32") return 4;
    if (dtype == "float16" || dtype == "bfloat16") return 2;
    return std::nullopt;
}

std::uint64_t bytes_of(const std::filesystem::path& path) {
    std::error_code failed;
    if (const auto bytes = std::filesystem::file_size(path, failed); !failed) return bytes;
    std::uint64_t sum = 0;
    std::size_t files = 0;
    for (std::filesystem::directory_iterator entry{path, failed}, end;
         !failed && entry != end && ++files <= limits::package_files_max; entry.increment(failed))
        if (std::error_code ignored; entry->is_regular_file(ignored)) sum += entry->file_size(ignored);
    return sum;
}

std::optional<memory::Estimate> read_estimate(const config::ModelSpec& model) {
    if (model.runtime != config::Runtime::generate) return std::nullopt;
    const std::string text = read_file(model.file / "manifest.json", limits::manifest_bytes_max).value_or("");
    boost::system::error_code wrong;
    return estimate_of(json::parse(text, wrong), model.generate.slots, model.generate.length);
}

}  // namespace

std::optional<memory::Estimate> estimate_of(const json::value& manifest, std::optional<std::uint32_t> slots,
                                            std::optional<std::uint32_t> length) {
    constexpr std::uint64_t count_max = std::uint64_t{1} << 20;  // of any one dimension
    const json::object* all = manifest.if_object();
    if (all == nullptr) return std::nullopt;
    const auto part = [&](std::string_view name) { return member<json::object>(*all, name).value_or(json::object{}); };
    const json::object kv = part("kv");
    const auto weight_bytes = figure(part("weights"), "bytes", memory::limits::bytes_max);
    const auto element = element_bytes(member<std::string>(part("dtypes"), "kv"));
    if (!weight_bytes || !element) return std::nullopt;
    memory::Bytes kv_bytes = 2 * *element;  // keys and values
    for (const auto factor : {slots ? std::optional<std::uint64_t>{*slots} : figure(*all, "slots", count_max),
                              length ? std::optional<std::uint64_t>{*length} : figure(*all, "length", count_max),
                              figure(*all, "rows", count_max), figure(kv, "layers", count_max),
                              figure(kv, "heads", count_max), figure(kv, "dim", count_max)}) {
        if (!factor || kv_bytes > memory::limits::bytes_max / *factor) return std::nullopt;
        kv_bytes *= *factor;
    }
    const memory::Bytes both = *weight_bytes + kv_bytes;
    return memory::Estimate{both + memory::limits::workspace_of_gpu, both + memory::limits::workspace_of_host};
}

std::map<std::string, FileFacts> file_facts(const std::vector<config::ModelSpec>& models) {
    std::map<std::string, FileFacts> facts;
    for (const auto& model : models) facts[model.name] = {bytes_of(model.file), read_estimate(model)};
    return facts;
}

}  // namespace bulkhead::supervisor
