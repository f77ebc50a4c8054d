#include "worker/package/package_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <memory>
#include <ranges>
#include <string_view>
#include <utility>
#include <vector>

#include <boost/json.hpp>
#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <torch/csrc/export/pt2_archive_constants.h>

#include "ipc/base/text.h"
#include "ipc/base/whole_io.h"
#include "worker/file/sha256.h"
#include "worker/torch/file_reader.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker {
namespace {

namespace fs = std::filesystem;
namespace json = boost::json;
using caffe2::serialize::PyTorchStreamReader;
using torch::_export::archive_spec::AOTINDUCTOR_DIR;

constexpr auto links_name = "by-file";
constexpr auto hashes_name = "hashes";
constexpr std::string_view partial_prefix = ".partial-";
constexpr std::size_t sha256_length = 64;
constexpr auto manifest_name = "manifest.json";
constexpr std::int64_t manifest_version = 1;

struct UnpackedFile {
    std::string path;  ///< below the target folder
    std::uint64_t size_bytes = 0;
    std::string sha256;
    std::int64_t changed_ns = 0;  ///< st_ctim after it was fully written
};

/// When the file last changed in any way; no program can set this time back.
std::int64_t changed_ns(const struct stat& status) noexcept {
    return status.st_ctim.tv_sec * 1'000'000'000LL + status.st_ctim.tv_nsec;
}

bool matches(const fs::path& folder, const UnpackedFile& file) {
    const auto path = folder / file.path;
    struct stat status {};
    if (::lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return false;
    if (static_cast<std::uint64_t>(status.st_size) != file.size_bytes) return false;
    if (changed_ns(status) == file.changed_ns || file.size_bytes == 0) return true;
    const auto opened = ModelFile::open_any(path);
    return opened && opened->sha256({}) == file.sha256;
}

/// Writes `manifest.json` into a folder of unpacked files, last: it marks the folder as complete.
Result<> write_manifest(const fs::path& folder, const std::vector<UnpackedFile>& files) {
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
    if (!write_all(file.get(), std::as_bytes(std::span{text})))
        return system_error(fmt::format("writing {}", path.string()), errno);
    if (::fsync(file.get()) != 0) return system_error(fmt::format("writing {} to disk", path.string()), errno);
    return {};
}

/// Reads it back. Empty if it is missing or was not written by `write_manifest`.
std::vector<UnpackedFile> read_manifest(const fs::path& folder) {
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

/// Returns the first listed file, or the manifest, that differs from what was unpacked; empty if
/// the folder is complete. A file with the manifest's size and change time is not read again: any
/// write would have changed that time.
std::string damaged_file(const fs::path& folder) {
    const auto files = read_manifest(folder);
    if (files.empty()) return manifest_name;
    const auto damaged = std::ranges::find_if(files, [&](const auto& file) { return !matches(folder, file); });
    return damaged == files.end() ? std::string{} : damaged->path;
}

/// Whether the path has only names, so that it stays below its target folder.
bool stays_inside(std::string_view path) {
    if (path.empty() || path.size() > limits::package_path_bytes_max) return false;
    for (const auto& name : std::views::split(path, '/')) {
        const std::string_view part{name.begin(), name.end()};
        if (part.empty() || part == "." || part == ".." || part.size() > NAME_MAX) return false;
        if (std::ranges::any_of(part, [](char c) { return c == '\0' || c == '\\'; })) return false;
    }
    return true;
}

Result<> make_folders(const fs::path& root, const fs::path& below) {
    auto folder = root;
    for (const auto& part : below) {
        folder /= part;
        if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
            return system_error(fmt::format("creating {}", folder.string()), errno);
    }
    return {};
}

Result<UnpackedFile> unpack_one(PyTorchStreamReader& archive, const std::string& name, const fs::path& target,
                                std::vector<std::byte>& chunk) {
    const auto path = target / name;
    if (auto made = make_folders(target, fs::path{name}.parent_path()); !made) return made.error();
    // O_EXCL: a repeated name is an error, not an overwrite.
    const UniqueFd file{::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600)};
    if (!file) return system_error(fmt::format("creating {}", path.string()), errno);

    UnpackedFile unpacked{name, archive.getRecordSize(name), {}, 0};
    Sha256 hash;
    auto chunks = archive.createChunkReaderIter(name, unpacked.size_bytes, chunk.size());
    for (std::uint64_t done = 0; done < unpacked.size_bytes;) {
        const auto count = chunks.next(chunk.data());
        if (count == 0) throw std::runtime_error{fmt::format("{} ends after {} bytes", name, done)};
        const auto bytes = std::span{chunk}.first(count);
        hash.update(bytes);
        if (!write_all(file.get(), bytes)) return system_error(fmt::format("writing {}", path.string()), errno);
        done += count;
    }
    unpacked.sha256 = hash.hex();
    if (::fsync(file.get()) != 0) return system_error(fmt::format("writing {} to disk", path.string()), errno);
    struct stat status {};
    if (::fstat(file.get(), &status) != 0) return system_error(fmt::format("looking at {}", path.string()), errno);
    unpacked.changed_ns = changed_ns(status);
    return unpacked;
}

/// Writes AOTInductor's files (`data/aotinductor/…`) below `target`: files 0600, folders 0700,
/// all synced to disk on return. Skips exported programs and sample inputs, which a package
/// may contain too.
///
/// Errors  load_failed for a broken archive, one without AOTInductor files, or one whose names lead
///         out of `target`; resources_exhausted if the disk is full
Result<std::vector<UnpackedFile>> unpack_archive(const ModelFile& package, const fs::path& target,
                                                 const std::function<void(std::uint64_t)>& progress) {
    const auto attempt = fmt::format("unpacking {}", package.path().string());
    const auto refused = [&](std::string_view what) {
        return Error{ErrorCode::load_failed, fmt::format("{}: {}", attempt, what),
                     "export the model again with torch._inductor.aoti_compile_and_package"};
    };
    try {
        PyTorchStreamReader archive{std::make_shared<FileReader>(package, progress)};
        std::vector<std::string> names;
        std::uint64_t total_bytes = 0;
        for (const auto& name : archive.getAllRecords()) {
            if (!stays_inside(name)) return refused(fmt::format("the name \"{}\" leads out of the package", name));
            if (!name.starts_with(AOTINDUCTOR_DIR)) continue;
            names.push_back(name);
            total_bytes += archive.getRecordSize(name);
        }
        if (names.empty())
            return Error{ErrorCode::load_failed, fmt::format("{}: nothing under {} in it", attempt, AOTINDUCTOR_DIR),
                         archive.hasRecord("constants.pkl") ? "it is a TorchScript file: declare `runtime: torchscript`"
                                                            : "export the model with "
                                                              "torch._inductor.aoti_compile_and_package"};
        if (names.size() > limits::package_files_max || total_bytes > limits::package_unpacked_bytes_max)
            return refused(fmt::format("{} files of {} bytes are more than {} or {}", names.size(), total_bytes,
                                       limits::package_files_max, limits::package_unpacked_bytes_max));

        std::vector<std::byte> chunk(limits::io_chunk_bytes);
        std::vector<UnpackedFile> files;
        for (const auto& name : names) {
            auto file = unpack_one(archive, name, target, chunk);
            if (!file) return file.error().during(attempt);
            files.push_back(std::move(file.value()));
        }
        return files;
    } catch (const std::exception& exception) {
        auto error = translate(exception, ErrorCode::load_failed, attempt);
        error.remedy = fmt::format("it has {} bytes: copy it again if that is not all, else export it again",
                                   package.size_bytes());
        return error;
    }
}

/// Opens and locks a folder without waiting; empty if another process holds the lock.
UniqueFd lock_folder(const fs::path& folder, int kind) {
    UniqueFd fd{::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW)};
    if (fd && ::flock(fd.get(), kind | LOCK_NB) != 0) fd.reset();
    return fd;
}

bool is_at(const UniqueFd& fd, const fs::path& path) {
    struct stat held {
    }, named{};
    return ::fstat(fd.get(), &held) == 0 && ::lstat(path.c_str(), &named) == 0 && held.st_dev == named.st_dev &&
           held.st_ino == named.st_ino;
}

/// Renames the entry away, then removes it. A process killed in between leaves a partial.
void remove_entry(const fs::path& folder, const fs::path& entry) {
    const auto doomed = folder / fmt::format("{}{}-removed-{}", partial_prefix, ::getpid(), entry.filename().string());
    std::error_code ignored;
    if (::rename(entry.c_str(), doomed.c_str()) == 0) fs::remove_all(doomed, ignored);
}

/// Owns a folder that is being filled: locked, and removed unless it was renamed away.
class Partial {
public:
    static Result<Partial> make(const fs::path& cache) {
        auto name = (cache / fmt::format("{}{}-XXXXXX", partial_prefix, ::getpid())).string();
        for (int attempt = 0; attempt < limits::cache_entry_tries; ++attempt) {
            auto path = name;
            if (::mkdtemp(path.data()) == nullptr)
                return system_error(fmt::format("creating a folder in the package cache {}", cache.string()), errno);
            // Between creation and lock, another process may take it for an abandoned one
            // and remove it.
            auto lock = lock_folder(path, LOCK_EX);
            if (lock && is_at(lock, path)) return Partial{path, std::move(lock)};
        }
        return Error{ErrorCode::internal, fmt::format("locking a new folder in the package cache {}", cache.string()),
                     "use a file system with flock(2) for the cache"};
    }
    Partial(Partial&& other) noexcept : path_{std::exchange(other.path_, {})}, lock_{std::move(other.lock_)} {}
    Partial& operator=(Partial&&) = delete;
    ~Partial() {
        std::error_code ignored;
        if (!path_.empty()) fs::remove_all(path_, ignored);
    }

    [[nodiscard]] const fs::path& path() const noexcept { return path_; }
    /// Publishes the folder: from now on any process may load it, and none may remove it while this
    /// lives. False, with errno, if a faster process has published an equal entry.
    [[nodiscard]] bool rename_to(const fs::path& target) {
        ::flock(lock_.get(), LOCK_SH | LOCK_NB);
        if (::rename(path_.c_str(), target.c_str()) != 0) return false;
        path_.clear();
        return true;
    }

private:
    Partial(fs::path path, UniqueFd lock) : path_{std::move(path)}, lock_{std::move(lock)} {}
    fs::path path_;
    UniqueFd lock_;
};

struct Entry {
    fs::path path;
    std::uint64_t bytes;
    fs::file_time_type used;
};

std::vector<Entry> entries_in(const fs::path& folder) {
    std::vector<Entry> entries;
    std::error_code error;
    for (const auto& item : fs::directory_iterator{folder, error}) {
        if (item.path().filename().string().size() != sha256_length) continue;
        Entry& entry = entries.emplace_back(Entry{item.path(), 0, item.last_write_time(error)});
        for (const auto& file : read_manifest(item.path())) entry.bytes += file.size_bytes;
    }
    std::ranges::sort(entries, {}, &Entry::used);
    return entries;
}

}  // namespace

Result<UnpackedPackage> PackageCache::open(const ModelFile& package,
                                           const std::function<void(std::uint64_t)>& progress) {
    if (auto made = make_folder(); !made) return made.error();

    std::error_code error;
    const auto known = fs::read_symlink(folder_ / links_name / package.identity(), error);
    if (!error)
        if (auto held = hold(known.filename().string())) return std::move(*held);

    auto name = package.sha256(progress);
    if (!name) return name.error();
    const auto unpacking = [&](std::uint64_t done) {
        if (progress) progress(package.size_bytes() + done);
    };
    for (int attempt = 0; attempt < limits::cache_entry_tries; ++attempt) {
        if (auto held = hold(name.value())) {
            // Without the link, the next load hashes again.
            fs::create_symlink(fs::path{".."} / name.value(), folder_ / links_name / package.identity(), error);
            return std::move(*held);
        }
        if (auto unpacked = unpack(package, name.value(), unpacking); !unpacked) return unpacked.error();
    }
    return Error{ErrorCode::resources_exhausted,
                 fmt::format("holding {} in the package cache {}: it was removed or damaged {} times",
                             package.path().string(), folder_.string(), limits::cache_entry_tries),
                 "let nothing but Bulkhead write into the cache"};
}

Result<std::string> PackageCache::sha256(const ModelFile& file,
                                         const std::function<void(std::uint64_t)>& progress) const {
    if (auto made = make_folder(); !made) return made.error();
    const auto hashes = folder_ / hashes_name;
    const auto link = hashes / file.identity();
    std::error_code error;
    if (const auto known = fs::read_symlink(link, error); !error && known.native().size() == sha256_length)
        return known.native();

    auto hash = file.sha256(progress);
    if (!hash) return hash.error();
    const fs::directory_iterator known{hashes, error};
    if (std::distance(begin(known), end(known)) >= static_cast<std::ptrdiff_t>(limits::known_hashes_max))
        for (const auto& old : fs::directory_iterator{hashes, error}) fs::remove(old, error);
    fs::create_symlink(hash.value(), link, error);  // if this fails, the next load hashes again
    return hash;
}

Result<> PackageCache::make_folder() const {
    std::error_code error;
    fs::create_directories(folder_.parent_path(), error);
    for (const auto& path : {folder_, folder_ / links_name, folder_ / hashes_name})
        if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
            return system_error(fmt::format("creating the package cache {}", path.string()), errno);
    struct stat status {};
    if (::lstat(folder_.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) || status.st_uid != ::geteuid() ||
        (status.st_mode & (S_IWGRP | S_IWOTH)) != 0)
        return Error{ErrorCode::not_permitted,
                     fmt::format("using the package cache {}: others may write into it", folder_.string()),
                     "its code is run: let the folder belong to the daemon's user, mode 0700"};
    return {};
}

std::optional<UnpackedPackage> PackageCache::hold(const std::string& name) const {
    const auto entry = folder_ / name;
    if (name.size() != sha256_length) return std::nullopt;
    // The holder of an exclusive lock is about to rename it: waiting would give a
    // folder that is gone.
    UniqueFd lock = lock_folder(entry, LOCK_SH);
    if (!lock || !is_at(lock, entry)) return std::nullopt;
    if (const std::string damaged = damaged_file(entry); !damaged.empty()) {
        spdlog::warn("{} is not as it was unpacked: another program wrote into the package cache, whose code is run "
                     "here; the package is unpacked again. Let nothing but Bulkhead write there",
                     made_printable((entry / damaged).string(), limits::package_path_bytes_max));
        lock.reset();
        if (auto alone = lock_folder(entry, LOCK_EX); alone && is_at(alone, entry)) remove_entry(folder_, entry);
        return std::nullopt;
    }
    ::futimens(lock.get(), nullptr);  // marks the use; a failure (read-only disk) is ignored
    return UnpackedPackage{entry, std::move(lock)};
}

Result<> PackageCache::unpack(const ModelFile& package, const std::string& name,
                              const std::function<void(std::uint64_t)>& progress) const {
    sweep_partials();
    auto partial = Partial::make(folder_);
    if (!partial) return partial.error();
    auto files = unpack_archive(package, partial.value().path(), progress);
    if (!files) return files.error();
    if (auto written = write_manifest(partial.value().path(), files.value()); !written) return written.error();
    if (auto same = package.unchanged(); !same) return same.error();
    if (!partial.value().rename_to(folder_ / name) && errno != EEXIST && errno != ENOTEMPTY)
        return system_error(fmt::format("naming {} in the package cache {}", name, folder_.string()), errno);
    evict();
    return {};
}

void PackageCache::sweep_partials() const {
    std::error_code error;
    for (const auto& item : fs::directory_iterator{folder_, error}) {
        if (!item.path().filename().string().starts_with(partial_prefix)) continue;
        if (auto alone = lock_folder(item.path(), LOCK_EX)) fs::remove_all(item.path(), error);
    }
}

void PackageCache::evict() const {
    const auto entries = entries_in(folder_);
    std::uint64_t bytes = 0;
    for (const auto& entry : entries) bytes += entry.bytes;
    for (const auto& entry : entries) {
        if (bytes <= bytes_max_) break;
        auto alone = lock_folder(entry.path, LOCK_EX);
        if (!alone || !is_at(alone, entry.path)) continue;
        remove_entry(folder_, entry.path);
        bytes -= entry.bytes;
    }
    std::error_code error;
    for (const auto& link : fs::directory_iterator{folder_ / links_name, error})
        if (!fs::exists(link.path(), error)) fs::remove(link.path(), error);
}

}  // namespace bulkhead::worker
