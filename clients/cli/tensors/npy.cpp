#include "clients/cli/tensors/npy.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "clients/cli/text/limits.h"
#include "clients/cli/text/terminal.h"
#include "ipc/base/whole_io.h"
#include "ipc/channel/dtype.h"
#include "ipc/channel/tensor_layout.h"

namespace bulkhead::cli {
namespace {

constexpr std::string_view magic = "\x93NUMPY";

struct Descr {
    std::string_view text;  ///< without its byte order
    wire::DType dtype;
};
constexpr std::array<Descr, 11> descrs{{{"b1", wire::DType::boolean},
                                        {"u1", wire::DType::uint8},
                                        {"i1", wire::DType::int8},
                                        {"i2", wire::DType::int16},
                                        {"i4", wire::DType::int32},
                                        {"i8", wire::DType::int64},
                                        {"f2", wire::DType::float16},
                                        {"f4", wire::DType::float32},
                                        {"f8", wire::DType::float64},
                                        {"c8", wire::DType::complex64},
                                        {"c16", wire::DType::complex128}}};

Error damaged(std::string attempt) {
    return {ErrorCode::input_invalid, std::move(attempt), "save the array again with numpy.save"};
}

}  // namespace

/// Parses the header, a Python dictionary: {'descr': '<f4', 'fortran_order': False,
/// 'shape': (1, 512), }
struct NpyHeaderParser {
    std::string_view text;

    std::optional<std::string_view> quoted() {
        skip_space();
        if (text.empty() || (text[0] != '\'' && text[0] != '"')) return std::nullopt;
        const std::size_t end = text.find(text[0], 1);
        if (end == std::string_view::npos) return std::nullopt;
        const std::string_view inside = text.substr(1, end - 1);
        text.remove_prefix(end + 1);
        return inside;
    }
    bool take(std::string_view word) {
        skip_space();
        if (!text.starts_with(word)) return false;
        text.remove_prefix(word.size());
        return true;
    }
    std::optional<std::vector<std::int64_t>> tuple() {
        std::vector<std::int64_t> dims;
        if (!take("(")) return std::nullopt;
        while (!take(")")) {
            skip_space();
            std::int64_t dim = 0;
            const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), dim);
            if (failure != std::errc{} || dim < 0 || dims.size() == wire::rank_max) return std::nullopt;
            text.remove_prefix(static_cast<std::size_t>(end - text.data()));
            dims.push_back(dim);
            if (!take(",") && !text.starts_with(")")) return std::nullopt;
        }
        return dims;
    }
    void skip_space() {
        while (!text.empty() && (text[0] == ' ' || text[0] == '\n' || text[0] == '\t')) text.remove_prefix(1);
    }

    static Result<wire::DType> dtype(std::string_view descr) {
        const bool is_big = descr.starts_with('>');
        std::string_view kind = descr;
        if (!kind.empty() && std::string_view{"<>|="}.find(kind[0]) != std::string_view::npos) kind.remove_prefix(1);
        const bool one_byte = kind.ends_with('1') && kind.size() == 2;
        for (const Descr& known : descrs) {
            if (known.text != kind) continue;
            if (is_big && !one_byte)
                return Error{ErrorCode::dtype_unsupported, fmt::format("dtype '{}' is big-endian", one_line(descr)),
                             "save array.astype(array.dtype.newbyteorder('<'))"};
            return known.dtype;
        }
        if (kind == "O")
            return Error{ErrorCode::dtype_unsupported,
                         "dtype object: the file holds pickled Python objects, no numbers",
                         "save a numeric array, such as array.astype('float32')"};
        return Error{ErrorCode::dtype_unsupported, fmt::format("dtype '{}'", one_line(descr)),
                     "save the array as bool, int8 to int64, uint8, float16 to float64, or complex"};
    }

    Result<NpyFile::Header> parse() {
        std::optional<std::string_view> descr;
        std::optional<bool> fortran;
        std::optional<std::vector<std::int64_t>> dims;
        if (!take("{")) return damaged("its header is not a dictionary");
        while (!take("}")) {
            const auto key = quoted();
            if (!key || !take(":")) return damaged("its header cannot be read");
            if (*key == "descr") {
                descr = quoted();
                if (!descr)
                    return Error{ErrorCode::dtype_unsupported, "a structured dtype", "save one array of plain numbers"};
            } else if (*key == "fortran_order") {
                if (take("True"))
                    fortran = true;
                else if (take("False"))
                    fortran = false;
            } else if (*key == "shape") {
                dims = tuple();
                if (!dims)
                    return damaged(
                        fmt::format("its shape cannot be read, or has more than {} dimensions", wire::rank_max));
            } else {
                return damaged(fmt::format("its header has the unknown key '{}'", one_line(*key)));
            }
            if (!take(",") && !text.starts_with("}")) return damaged("its header cannot be read");
        }
        if (!descr || !fortran || !dims) return damaged("its header lacks descr, fortran_order or shape");
        if (*fortran && dims->size() > 1)
            return Error{ErrorCode::input_invalid, "the array is in Fortran order",
                         "save numpy.ascontiguousarray(array)"};
        const Result<wire::DType> dtype_read = dtype(*descr);
        if (!dtype_read) return dtype_read.error();
        return NpyFile::Header{*dtype_read, std::move(*dims)};
    }
};

Result<NpyFile> NpyFile::open(const std::filesystem::path& path) {
    const std::string step = "reading " + path.string();
    // A FIFO must not block us.
    UniqueFd file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    if (!file) {
        Error error = system_error(step, errno);
        if (errno == ENOENT) error.code = ErrorCode::input_invalid;
        if (error.remedy.empty()) error.remedy = "check the path after the @";
        return error;
    }
    struct stat facts {};
    if (::fstat(file.get(), &facts) != 0) return system_error(step, errno);
    if (!S_ISREG(facts.st_mode))
        return Error{ErrorCode::input_invalid, step + ": not a regular file", "name a .npy file"};
    const auto size = static_cast<std::uint64_t>(facts.st_size);

    std::array<std::byte, 12> prefix{};  // magic, version, and the longer of the two header sizes
    const auto got = read_at(file.get(), prefix, 0);
    if (!got) return system_error(step, errno);
    if (*got < 10 || std::memcmp(prefix.data(), magic.data(), magic.size()) != 0)
        return Error{ErrorCode::input_invalid, step + ": not a .npy file: it does not start with \\x93NUMPY",
                     "save it with numpy.save"};
    const auto byte = [&](std::size_t i) { return std::to_integer<std::uint64_t>(prefix[i]); };
    const std::uint64_t version = byte(6);
    if (version != 1 && version != 2)
        return damaged(fmt::format("{}: .npy format version {}.{}, of which 1 and 2 are read", step, version, byte(7)));
    const std::uint64_t header_offset = version == 1 ? 10 : 12;
    std::uint64_t header_bytes = byte(8) | byte(9) << 8;
    if (version == 2) header_bytes |= byte(10) << 16 | byte(11) << 24;
    if (header_bytes > limits::npy_header_bytes_max || header_offset + header_bytes > size)
        return damaged(fmt::format("{}: a header of {} bytes in a file of {}", step, header_bytes, size));

    std::string text(header_bytes, '\0');
    const auto header_got = read_at(file.get(), std::as_writable_bytes(std::span{text}), header_offset);
    if (!header_got) return system_error(step, errno);
    if (*header_got != text.size()) return damaged(step + ": the file was cut while it was read");
    Result<Header> header = NpyHeaderParser{text}.parse();
    if (!header) return std::move(header).error().during(step);
    const Result<std::uint64_t> data_bytes = tensor_bytes(header->dtype, header->dims);
    if (!data_bytes) return Error{data_bytes.error()}.during(step);
    const std::uint64_t there = size - header_offset - header_bytes;
    if (there != *data_bytes)
        return damaged(fmt::format("{}: {} [{}] has {} bytes, the file {}", step, to_string(header->dtype),
                                   fmt::join(header->dims, ", "), *data_bytes, there));
    return NpyFile{path, std::move(file), std::move(*header), header_offset + header_bytes};
}

Result<> NpyFile::read(std::span<std::byte> to) const {
    const auto got = read_at(file_.get(), to, data_offset_);
    if (!got) return system_error("reading " + path_.string(), errno);
    if (*got != to.size()) return damaged(fmt::format("reading {}: the file was cut meanwhile", path_.string()));
    return {};
}

Result<> write_npy(const std::filesystem::path& path, wire::DType dtype, std::span<const std::int64_t> dims,
                   std::span<const std::byte> bytes) {
    const std::string step = "writing " + path.string();
    const Descr* descr = nullptr;
    for (const Descr& known : descrs)
        if (known.dtype == dtype) descr = &known;
    if (descr == nullptr)
        return Error{ErrorCode::dtype_unsupported, fmt::format("{}: .npy has no {}", step, to_string(dtype)),
                     "read it from --json instead"};
    const char order = element_size(dtype) == 1 ? '|' : '<';
    std::string header = fmt::format("{{'descr': '{}{}', 'fortran_order': False, 'shape': ({}{}), }}", order,
                                     descr->text, fmt::join(dims, ", "), dims.size() == 1 ? "," : "");
    // Data start at a multiple of 64, as numpy writes them, so that they can be mapped.
    constexpr std::size_t prefix = 10;
    header.append(63 - (prefix + header.size()) % 64, ' ').push_back('\n');
    std::string whole{magic};
    whole += {'\1', '\0', static_cast<char>(header.size() & 0xff), static_cast<char>(header.size() >> 8)};
    whole += header;

    const UniqueFd file{::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)};
    if (!file) return system_error(step, errno);
    for (const auto part : {std::as_bytes(std::span{whole}), bytes})
        if (!write_all(file.get(), part)) return system_error(step, errno);
    return {};
}

}  // namespace bulkhead::cli
