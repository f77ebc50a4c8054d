#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"
#include "ipc/channel/wire.h"

namespace bulkhead::cli {

/// A NumPy .npy file, opened and checked. Its data are read later, straight to where
/// they are needed.
///
/// Format versions 1 and 2, little-endian, C order. The file must be exactly as long as
/// its header says.
/// Source  NEP 1, numpy.lib.format
class NpyFile {
public:
    /// Errors  input_invalid naming what was found and how to save the array instead;
    ///         dtype_unsupported
    static Result<NpyFile> open(const std::filesystem::path& path);

    [[nodiscard]] wire::DType dtype() const noexcept { return header_.dtype; }
    [[nodiscard]] const std::vector<std::int64_t>& dims() const noexcept { return header_.dims; }

    /// Reads the data into `to`, which must have their size. May be called again.
    /// Errors  input_invalid if the file was truncated meanwhile
    [[nodiscard]] Result<> read(std::span<std::byte> to) const;

private:
    struct Header {
        wire::DType dtype{};
        std::vector<std::int64_t> dims;
    };
    static Result<Header> header_of(std::string text);
    NpyFile(std::filesystem::path path, UniqueFd file, Header header, std::uint64_t data_offset)
        : path_{std::move(path)}, file_{std::move(file)}, header_{std::move(header)}, data_offset_{data_offset} {}

    std::filesystem::path path_;
    UniqueFd file_;
    Header header_;
    std::uint64_t data_offset_;
};

/// Writes one array, replacing the file's contents.
/// Errors  dtype_unsupported for bfloat16, which .npy has no name for; those of the file system
[[nodiscard]] Result<> write_npy(const std::filesystem::path& path, wire::DType dtype,
                                 std::span<const std::int64_t> dims, std::span<const std::byte> bytes);

}  // namespace bulkhead::cli
