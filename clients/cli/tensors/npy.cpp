#include "clients/cli/tensors/npy.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <boost/json.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "clients/cli/text/limits.h"
#include "clients/cli/text/terminal.h"
#include "ipc/base/json_codec.h"
#include "ipc/base/whole_io.h"
#include "ipc/channel/dtype.h"
#include "ipc/channel/tensor_layout.h"

namespace bulkhead::cli {
namespace {

namespace json = boost::json;

constexpr std::string_view magic = "\x93NUMPY";

Error damaged(std::string attempt) {
    return {ErrorCode::input_invalid, std::move(attempt), "save the array again with numpy.save"};
}

Result<wire::DType> dtype_of(std::string_view descr) {
    std::string_view kind = descr;
    if (!kind.empty() && std::string_view{"<>|="}.find(kind[0]) != std::string_view::npos) kind.remove_prefix(1);
    if (kind == "O")
        return Error{ErrorCode::dtype_unsupported, "dtype object: the file holds pickled Python objects, no numbers",
                     "save a numeric array, such as array.astype('float32')"};
    const auto dtype =
        find_dtype([&](const DTypeFacts& one) { return fmt::format("{}{}", one.kind, one.size) == kind; });
    if (!dtype || facts_of(*dtype).kind == 'B')
        return Error{ErrorCode::dtype_unsupported, fmt::format("dtype '{}'", one_line(descr)),
                     "save the array as bool, int8 to int64, uint8, float16 to float64, or complex"};
    if (descr.starts_with('>') && element_size(*dtype) > 1)
        return Error{ErrorCode::dtype_unsupported, fmt::format("dtype '{}' is big-endian", one_line(descr)),
                     "save array.astype(array.dtype.newbyteorder('<'))"};
    return *dtype;
}

/// Parses the header, a Python dictionary: {'descr': '<f4', 'fortran_order': False,
/// 'shape': (1, 512), }. Written with JSON's signs, it is JSON but for its trailing commas.
Result<json::object> parse_header(std::string text) {
    constexpr std::pair<char, char> signs[] = {{'\'', '"'}, {'(', '['}, {')', ']'}};
    for (const auto& [python, json] : signs) std::ranges::replace(text, python, json);
    // Before it, a field of a structured dtype may be named True.
    const std::size_t order = text.find("fortran_order");
    for (const std::string_view word : {"True", "False"})
        if (const std::size_t at = text.find(word, order); at != std::string::npos)
            text[at] = word == "True" ? 't' : 'f';
    json::parse_options options;
    options.allow_trailing_commas = true;
    boost::system::error_code failure;
    const json::value header = json::parse(text, failure, {}, options);
    if (failure) return damaged("its header cannot be read");
    if (!header.is_object()) return damaged("its header is not a dictionary");
    for (const auto& member : header.get_object())
        if (member.key() != "descr" && member.key() != "fortran_order" && member.key() != "shape")
            return damaged(fmt::format("its header has the unknown key '{}'", one_line(member.key())));
    return header.get_object();
}

}  // namespace

Result<NpyFile::Header> NpyFile::header_of(std::string text) {
    const Result<json::object> header = parse_header(std::move(text));
    if (!header) return header.error();
    if (const json::value* descr = header->if_contains("descr"); descr != nullptr && !descr->is_string())
        return Error{ErrorCode::dtype_unsupported, "a structured dtype", "save one array of plain numbers"};
    const auto descr = json_codec::member<std::string>(*header, "descr");
    const auto fortran = json_codec::member<bool>(*header, "fortran_order");
    const json::value* shape = header->if_contains("shape");
    if (!descr || !fortran || shape == nullptr) return damaged("its header lacks descr, fortran_order or shape");
    const auto dims = json::try_value_to<std::vector<std::int64_t>>(*shape);
    if (!dims || dims->size() > wire::rank_max || std::ranges::any_of(*dims, [](std::int64_t dim) { return dim < 0; }))
        return damaged(fmt::format("its shape cannot be read, or has more than {} dimensions", wire::rank_max));
    if (*fortran && dims->size() > 1)
        return Error{ErrorCode::input_invalid, "the array is in Fortran order", "save numpy.ascontiguousarray(array)"};
    const Result<wire::DType> dtype = dtype_of(*descr);
    if (!dtype) return dtype.error();
    return Header{*dtype, *dims};
}

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
    Result<Header> header = header_of(std::move(text));
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
    const auto [name, kind, size] = facts_of(dtype);
    if (kind == 'B')
        return Error{ErrorCode::dtype_unsupported, fmt::format("{}: .npy has no {}", step, name),
                     "read it from --json instead"};
    std::string header =
        fmt::format("{{'descr': '{}{}{}', 'fortran_order': False, 'shape': ({}{}), }}", size == 1 ? '|' : '<', kind,
                    size, fmt::join(dims, ", "), dims.size() == 1 ? "," : "");
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
