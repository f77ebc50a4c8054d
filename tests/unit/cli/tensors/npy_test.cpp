#include "clients/cli/tensors/npy.h"

#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/temporary_folder.h"

namespace bulkhead::cli {
namespace {

using test::TemporaryFolder;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using wire::DType;

/// A version 1 file, byte for byte as numpy.save writes it but for the padding.
std::string npy(const std::string& header, const std::string& data, char version = 1) {
    std::string bytes = "\x93NUMPY";
    bytes += {version, '\0', static_cast<char>(header.size() & 0xff), static_cast<char>(header.size() >> 8)};
    if (version == 2) bytes += std::string(2, '\0');
    return bytes + header + data;
}

std::string floats(std::initializer_list<float> values) {
    std::string bytes(values.size() * sizeof(float), '\0');
    std::memcpy(bytes.data(), std::data(values), bytes.size());
    return bytes;
}

const std::string row_header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 3), }\n";

struct Npy : testing::Test {
    TemporaryFolder folder;

    Error error_of(const std::string& bytes) {
        const Result<NpyFile> file = NpyFile::open(folder.write("a.npy", bytes));
        EXPECT_FALSE(file);
        return file ? Error{} : file.error();
    }
};

TEST_F(Npy, IsReadStraightIntoTheGivenBytes) {
    for (const char version : {1, 2}) {
        const auto file = NpyFile::open(folder.write("a.npy", npy(row_header, floats({1, -2, 3.5F}), version)));
        ASSERT_TRUE(file) << file.error().text();
        EXPECT_EQ(file->dtype(), DType::float32);
        EXPECT_THAT(file->dims(), ElementsAre(1, 3));
        std::array<float, 3> values{};
        ASSERT_TRUE(file->read(std::as_writable_bytes(std::span{values})));
        EXPECT_THAT(values, ElementsAre(1, -2, 3.5F));
    }
}

TEST_F(Npy, ComesBackAsItWasWritten) {
    const std::array<std::int64_t, 6> values{1, 2, 3, -4, 5, 6};
    const auto path = folder.path() / "out.npy";
    for (const std::vector<std::int64_t>& dims : {std::vector<std::int64_t>{6}, {2, 3}, {1, 6, 1}}) {
        ASSERT_TRUE(write_npy(path, DType::int64, dims, std::as_bytes(std::span{values})));
        EXPECT_EQ(std::filesystem::file_size(path) % 64, sizeof values) << "the data lie as numpy aligns them";
        const auto file = NpyFile::open(path);
        ASSERT_TRUE(file) << file.error().text();
        EXPECT_EQ(file->dims(), dims);
        std::array<std::int64_t, 6> read{};
        ASSERT_TRUE(file->read(std::as_writable_bytes(std::span{read})));
        EXPECT_EQ(read, values);
    }
}

TEST_F(Npy, MayBeAScalarOrEmpty) {
    const double one = 1.5;
    ASSERT_TRUE(write_npy(folder.path() / "s.npy", DType::float64, {}, std::as_bytes(std::span{&one, 1})));
    EXPECT_THAT(NpyFile::open(folder.path() / "s.npy").value().dims(), IsEmpty());
    ASSERT_TRUE(write_npy(folder.path() / "e.npy", DType::float32, std::array<std::int64_t, 2>{0, 4}, {}));
    EXPECT_THAT(NpyFile::open(folder.path() / "e.npy").value().dims(), ElementsAre(0, 4));
}

TEST_F(Npy, RefusesWhatItCannotReadAndSaysHowToSave) {
    const auto with_dtype = [](const std::string& descr) {
        return npy("{'descr': " + descr + ", 'fortran_order': False, 'shape': (1,), }", std::string(8, '\0'));
    };
    const auto with_header = [](const std::string& header) { return npy(header, floats({1})); };
    std::string long_header = npy("", "", 2);
    long_header.replace(8, 4, "\xff\xff\xff\x7f");
    using enum ErrorCode;
    const struct {
        std::string bytes;
        ErrorCode code;
        const char* attempt;
    } table[] = {
        {npy("{'descr': '<f4', 'fortran_order': True, 'shape': (1, 3), }", floats({1, 2, 3})), input_invalid,
         "Fortran order"},
        {with_dtype("'|O'"), dtype_unsupported, "object"},
        {with_dtype("'>f8'"), dtype_unsupported, "big-endian"},
        {with_dtype("'<U2'"), dtype_unsupported, "<U2"},
        {with_dtype("'<M8[ns]'"), dtype_unsupported, "<M8[ns]"},
        {with_dtype("[('a', '<f4'), ('b', '<f4')]"), dtype_unsupported, "structured"},
        {with_dtype("[('isTrue', '<f4')]"), dtype_unsupported, "structured"},
        {npy(row_header, floats({1, 2})), input_invalid, "has 12 bytes, the file 8"},
        {npy(row_header, floats({1, 2, 3, 4})), input_invalid, "has 12 bytes, the file 16"},
        {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296, 4), }", ""), shape_mismatch,
         ""},
        {long_header + std::string(1000, ' '), input_invalid, "a header of 2147483647 bytes"},
        {with_header(""), input_invalid, ""},
        {with_header("{"), input_invalid, ""},
        {with_header("[]"), input_invalid, "not a dictionary"},
        {with_header("{'descr': '<f4'}"), input_invalid, "lacks"},
        {with_header("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}"), input_invalid, ""},
        {with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"), input_invalid, ""},
        {with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1 2)}"), input_invalid, ""},
        {with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1)}"), input_invalid,
         "8 dimensions"},
        {with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}"), input_invalid, ""},
        {with_header("{'descr': '<f4', 'extra': 1, 'fortran_order': False, 'shape': (1,)}"), input_invalid, "'extra'"},
    };
    for (const auto& [bytes, code, attempt] : table) {
        SCOPED_TRACE(bytes);
        const Error error = error_of(bytes);
        EXPECT_EQ(error.code, code);
        EXPECT_THAT(error.attempt, HasSubstr(attempt));
        EXPECT_FALSE(error.remedy.empty());
    }
}

TEST_F(Npy, RefusesEveryTruncation) {
    const std::string whole = npy(row_header, floats({1, 2, 3}));
    for (std::size_t size = 0; size < whole.size(); ++size) {
        const Error error = error_of(whole.substr(0, size));
        EXPECT_EQ(error.code, ErrorCode::input_invalid) << size;
        EXPECT_FALSE(error.remedy.empty());
    }
}

TEST_F(Npy, NamesAFileThatIsMissingOrCannotBeWritten) {
    EXPECT_THAT(NpyFile::open(folder.path() / "none.npy").error().attempt, HasSubstr("none.npy: No such file"));
    EXPECT_THAT(NpyFile::open(folder.path()).error().attempt, HasSubstr("not a regular file"));
    EXPECT_THAT(write_npy(folder.path() / "no/such/a.npy", DType::int8, {}, {}).error().attempt,
                HasSubstr("no/such/a.npy: No such file"));
    EXPECT_EQ(write_npy(folder.path() / "a.npy", DType::bfloat16, {}, {}).error().code, ErrorCode::dtype_unsupported);
}

}  // namespace
}  // namespace bulkhead::cli
