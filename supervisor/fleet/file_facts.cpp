#include "supervisor/fleet/file_facts.h"

#include <filesystem>
#include <fstream>

#include "supervisor/base/limits.h"
#include "supervisor/memory/package.h"

namespace bulkhead::supervisor {
namespace {

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

std::optional<memory::Estimate> estimate_of(const config::ModelSpec& model) {
    if (model.runtime != config::Runtime::generate) return std::nullopt;
    std::string text(limits::manifest_bytes_max, '\0');
    std::ifstream file{model.file / "manifest.json", std::ios::binary};
    file.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<std::size_t>(file.gcount()));
    boost::system::error_code wrong;
    const auto size =
        memory::package_size(boost::json::parse(text, wrong), model.generate.slots, model.generate.length);
    return size ? std::optional{size->estimate()} : std::nullopt;
}

}  // namespace

std::map<std::string, FileFacts> file_facts(const std::vector<config::ModelSpec>& models) {
    std::map<std::string, FileFacts> facts;
    for (const auto& model : models) facts[model.name] = {bytes_of(model.file), estimate_of(model)};
    return facts;
}

}  // namespace bulkhead::supervisor
