#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"
#include "worker/file/model_file.h"
#include "worker/model/load_limits.h"

namespace bulkhead::worker {

/// A locked package in the cache: while this lives, no process removes it.
struct UnpackedPackage {
    std::filesystem::path folder;  ///< its name is the SHA-256 of the package's file
    UniqueFd lock;
};

/// AOTInductor packages, unpacked once per content. LibTorch's own loader unpacks into a new folder
/// in /tmp at each load, and a killed process leaves that behind.
///
///   <sha256>/           one package: data/aotinductor/…, and manifest.json, which lists
///                       each file's hash
/// by-file/<identity>  a link to the entry of a file that was hashed before, so that it is
///                     not hashed again
///   hashes/<identity>   a link whose target is the SHA-256 of a file that is not unpacked
/// .partial-<pid>-…    being unpacked, or left by a dead process: the next one that
///                     unpacks removes it
///
/// Locks   flock(2) on the folders, held by descriptor, so that a process' death releases them:
///         shared while a package is loaded, exclusive while it is unpacked or removed
/// Thread  any number of processes; one thread per object
class PackageCache {
public:
    /// Creates `folder` with mode 0700 if it is missing.
    explicit PackageCache(std::filesystem::path folder, std::uint64_t bytes_max = limits::package_cache_bytes_max)
        : folder_{std::move(folder)}, bytes_max_{bytes_max} {}

    /// Finds the package's entry or makes it. `progress` gets the bytes read of `2 * size_bytes`
    /// (hashed, then unpacked); it is not called if the entry is found by the file's identity.
    /// Errors  load_failed, resources_exhausted (disk full), not_permitted
    [[nodiscard]] Result<UnpackedPackage> open(const ModelFile& package,
                                               const std::function<void(std::uint64_t)>& progress = {});

    /// Returns the SHA-256 of a file that is not unpacked, such as weights. Reads it once, and
    /// remembers the hash while its identity stays. `progress` gets the bytes read; not called if
    /// the hash is known.
    /// Errors  load_failed, not_permitted
    [[nodiscard]] Result<std::string> sha256(const ModelFile& file,
                                             const std::function<void(std::uint64_t)>& progress = {}) const;

private:
    [[nodiscard]] Result<> make_folder() const;
    /// Empty if there is no complete entry of that name.
    [[nodiscard]] std::optional<UnpackedPackage> hold(const std::string& name) const;
    [[nodiscard]] Result<> unpack(const ModelFile& package, const std::string& name,
                                  const std::function<void(std::uint64_t)>& progress) const;
    void sweep_partials() const;
    /// Removes the least recently used entries until the rest fits, and dangling links.
    void evict() const;

    std::filesystem::path folder_;
    std::uint64_t bytes_max_;
};

}  // namespace bulkhead::worker
