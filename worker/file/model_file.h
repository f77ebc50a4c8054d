#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"

namespace bulkhead::worker {

/// A model's file, opened once, so that the same file is checked, hashed and loaded even if its
/// name is changed to another file meanwhile.
class ModelFile {
public:
    /// Errors  load_failed if it is missing, unreadable, not a regular file, empty, or not a zip
    ///         archive, as TorchScript files and packages are
    static Result<ModelFile> open(const std::filesystem::path& path);
    /// Opens a file that need not be an archive, such as weights.
    static Result<ModelFile> open_any(const std::filesystem::path& path);

    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
    [[nodiscard]] std::uint64_t size_bytes() const noexcept { return size_bytes_; }

    /// Device, inode, size and both times: while these are the same, the contents are unchanged.
    [[nodiscard]] const std::string& identity() const noexcept { return identity_; }
    /// Errors  load_failed if the file was written to since it was opened
    [[nodiscard]] Result<> unchanged() const;

    /// Returns the contents' SHA-256 in hexadecimal; `progress` gets the number of bytes read.
    [[nodiscard]] Result<std::string> sha256(const std::function<void(std::uint64_t)>& progress) const;

    /// Reads as many bytes as are there; empty, with errno set, if that fails.
    [[nodiscard]] std::optional<std::size_t> read(std::span<std::byte> target, std::uint64_t offset) const;

private:
    ModelFile(std::filesystem::path path, UniqueFd fd) : path_{std::move(path)}, fd_{std::move(fd)} {}

    std::filesystem::path path_;
    UniqueFd fd_;
    std::uint64_t size_bytes_ = 0;
    std::string identity_;
};

}  // namespace bulkhead::worker
