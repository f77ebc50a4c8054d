#include "worker/package/package_manifest.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include <boost/json.hpp>
#include <fmt/format.h>

#include "worker/file/sha256.h"
#include "worker/model/load_limits.h"

namespace bulkhead::worker {
namespace {

namespace json = boost::json;

constexpr auto manifest_name = "manifest.json";
constexpr std::int64_t manifest_version = 1;

std::string file_sha256(const std::filesystem::path& path) {
    std::ifstream file{path, std::ios::binary};
    std::vector<char> chunk(limits::io_chunk_bytes);
    Sha256 hash;
    while (file.read(chunk.data(), static_cast<std::streamsize>(chunk.size())) || file.gcount() > 0)
        hash.update(std::as_bytes(std::span{chunk}.first(static_cast<std::size_t>(file.gcount()))));
    return hash.hex();
}

bool matches(const std::filesystem::path& folder, const UnpackedFile& file) {
    const auto path = folder / file.path;
    struct stat status {};
    if (::lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return false;
    if (static_cast<std::uint64_t>(status.st_size) != file.size_bytes) return false;
    return changed_ns(status) == file.changed_ns || file_sha256(path) == file.sha256;
}

}  // namespace

std::uint64_t total_bytes(const std::vector<UnpackedFile>& files) {
    std::uint64_t total = 0;
    for (const auto& file : files) total += file.size_bytes;
    return total;
}

Result<> write_manifest(const std::filesystem::path& folder, const std::vector<UnpackedFile>& files) {
    json::array listed;
    for (const auto& file : files)
        listed.push_back(json::object{{"path", file.path},
                                      {"size_bytes", file.size_bytes},
                                      {"sha256", file.sha256},
                                      {"changed_ns", file.changed_ns}});
    const auto text = json::serialize(json::object{{"version", manifest_version}, {"files", std::move(listed)}});

    const auto path = folder / manifest_name;
    const UniqueFd file{::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600)};
    if (!file) return system_error(fmt::format("creating {}", path.string()), errno);
    const auto written = ::write(file.get(), text.data(), text.size());
    if (written != static_cast<ssize_t>(text.size()))
        return system_error(fmt::format("writing {}", path.string()), written < 0 ? errno : ENOSPC);
    if (::fsync(file.get()) != 0) return system_error(fmt::format("writing {} to disk", path.string()), errno);
    return {};
}

std::vector<UnpackedFile> read_manifest(const std::filesystem::path& folder) {
    std::ifstream stream{folder / manifest_name, std::ios::binary};
    std::string text(limits::package_text_bytes_max, '\0');
    stream.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<std::size_t>(stream.gcount()));
    try {
        const auto manifest = json::parse(text);
        if (manifest.at("version").to_number<std::int64_t>() != manifest_version) return {};
        std::vector<UnpackedFile> files;
        for (const auto& file : manifest.at("files").as_array())
            files.push_back({std::string{file.at("path").as_string()}, file.at("size_bytes").to_number<std::uint64_t>(),
                             std::string{file.at("sha256").as_string()},
                             file.at("changed_ns").to_number<std::int64_t>()});
        return files;
    } catch (const std::exception&) {  // not ours, or truncated: the entry is unpacked again
        return {};
    }
}

std::string damaged_file(const std::filesystem::path& folder) {
    const auto files = read_manifest(folder);
    if (files.empty()) return manifest_name;
    const auto damaged = std::ranges::find_if(files, [&](const auto& file) { return !matches(folder, file); });
    return damaged == files.end() ? std::string{} : damaged->path;
}

}  // namespace bulkhead::worker
