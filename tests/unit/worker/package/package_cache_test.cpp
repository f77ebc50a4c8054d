#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <map>
#include <optional>
#include <sstream>
#include <thread>

#include <caffe2/serialize/inline_container.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include "tests/unit/worker/model_fixture.h"
#include "worker/package/package_cache.h"

namespace bulkhead::worker {
namespace {

namespace fs = std::filesystem;
using test::contents;
using testing::HasSubstr;

constexpr auto library = "data/aotinductor/model/a.wrapper.so";

/// A package as LibTorch writes it, with any records.
void write_package(const fs::path& file, const std::map<std::string, std::string>& records) {
    caffe2::serialize::PyTorchStreamWriter writer{file.string()};
    for (const auto& [name, text] : records) writer.writeRecord(name, text.data(), text.size());
    writer.writeEndOfFile();
}

class PackageCacheTest : public testing::Test {
protected:
    struct Opened {
        Result<UnpackedPackage> package;
        std::uint64_t bytes_read;
    };

    Opened open(const fs::path& file, std::uint64_t bytes_max = limits::package_cache_bytes_max) {
        auto opened = ModelFile::open(file);
        if (!opened) return {opened.error(), 0};
        std::uint64_t read = 0;
        auto package = PackageCache{cache_, bytes_max}.open(opened.value(), [&](std::uint64_t done) { read = done; });
        return {std::move(package), read};
    }
    Error refusal(const fs::path& file) {
        auto opened = open(file);
        return opened.package ? Error{} : opened.package.error();
    }
    fs::path package(const std::string& name, const std::string& text) {
        const auto file = folder_.path() / name;
        write_package(file, {{library, text}});
        return file;
    }
    std::vector<fs::path> in_cache(std::string_view prefix) const {
        std::vector<fs::path> found;
        for (const auto& item : fs::directory_iterator{cache_})
            if (const auto name = item.path().filename().string(); name.starts_with(prefix) && name != "by-file" && name != "hashes")
                found.push_back(item.path());
        return found;
    }

    test::TemporaryFolder folder_;
    fs::path cache_ = folder_.path() / "cache";
};

TEST_F(PackageCacheTest, UnpacksThePackageForItsOwnerAlone) {
    write_package(folder_.path() / "a.pt2", {{library, "code"}, {"data/weights/w", "many bytes"}});
    const auto opened = open(folder_.path() / "a.pt2");

    ASSERT_TRUE(opened.package) << opened.package.error().text();
    const auto& folder = opened.package.value().folder;
    EXPECT_EQ(contents(folder / library), "code");
    EXPECT_EQ(fs::status(cache_).permissions(), fs::perms::owner_all);
    EXPECT_EQ(fs::status(folder).permissions(), fs::perms::owner_all);
    EXPECT_EQ(fs::status(folder / library).permissions(), fs::perms::owner_read | fs::perms::owner_write);
    EXPECT_TRUE(in_cache(".partial-").empty());
    EXPECT_FALSE(fs::exists(folder / "data/weights")) << "not AOTInductor's";
}

TEST_F(PackageCacheTest, ReadsAKnownFileNotAgain) {
    const auto file = package("a.pt2", "code");
    const auto first = open(file), second = open(file);
    EXPECT_GT(first.bytes_read, fs::file_size(file));
    EXPECT_EQ(second.bytes_read, 0U);
    EXPECT_EQ(second.package.value().folder, first.package.value().folder);
}

TEST_F(PackageCacheTest, HashesAFileThatItDoesNotUnpackOnce) {
    const auto file = folder_.path() / "weights";
    const auto hashed = [&] {
        std::uint64_t read = 0;
        auto hash = PackageCache{cache_}.sha256(ModelFile::open_any(file).value(), [&](auto done) { read = done; });
        return std::pair{hash.value(), read};
    };
    // FIPS 180-2, B.1.
    constexpr auto of_abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    test::write_file(file, "abc");
    EXPECT_EQ(hashed(), std::pair(std::string{of_abc}, std::uint64_t{3}));
    (void)open(package("a.pt2", "code"), 0);  // which evicts
    EXPECT_EQ(hashed(), std::pair(std::string{of_abc}, std::uint64_t{0}));
    test::write_file(file, "abcd");
    EXPECT_NE(hashed().first, of_abc);
}

TEST_F(PackageCacheTest, RemembersABoundedNumberOfHashes) {
    const auto hashes = cache_ / "hashes";
    fs::create_directories(hashes);
    fs::permissions(cache_, fs::perms::owner_all);
    for (std::size_t i = 0; i < limits::known_hashes_max; ++i) fs::create_symlink("hash", hashes / std::to_string(i));
    const auto file = package("a.pt2", "code");
    ASSERT_TRUE(PackageCache{cache_}.sha256(ModelFile::open_any(file).value()));
    EXPECT_EQ(std::distance(fs::directory_iterator{hashes}, {}), 1);
}

TEST_F(PackageCacheTest, KeepsOneEntryForOneContent) {
    const auto file = package("a.pt2", "code"), copy = folder_.path() / "b.pt2";
    fs::copy_file(file, copy);
    EXPECT_EQ(open(file).package.value().folder, open(copy).package.value().folder);
    EXPECT_EQ(in_cache("").size(), 1U);
}

TEST_F(PackageCacheTest, LetsSeveralUnpackOnePackageAtOnce) {
    const auto file = package("a.pt2", std::string(100'000, 'x'));
    std::vector<std::optional<Opened>> opened(4);
    {
        std::vector<std::jthread> openers;
        for (auto& one : opened) openers.emplace_back([&] { one = open(file); });
    }
    for (const auto& one : opened) {
        ASSERT_TRUE(one->package) << one->package.error().text();
        EXPECT_EQ(one->package.value().folder, opened[0]->package.value().folder);
    }
    EXPECT_EQ(in_cache("").size(), 1U);
}

TEST_F(PackageCacheTest, SeesThatAFileHasChanged) {
    const auto before = open(package("a.pt2", "old code")).package.value().folder;
    const auto after = open(package("a.pt2", "new code")).package.value().folder;
    EXPECT_NE(before, after);
    EXPECT_EQ(contents(after / library), "new code");
}

TEST_F(PackageCacheTest, UnpacksADamagedEntryAgain) {
    const auto file = package("a.pt2", "code");
    const auto entry = open(file).package.value().folder;

    test::write_file(entry / library, "edoc");  // as long as before
    EXPECT_EQ(contents(open(file).package.value().folder / library), "code");

    fs::remove(entry / library);
    EXPECT_EQ(contents(open(file).package.value().folder / library), "code");

    fs::resize_file(entry / "manifest.json", 10);
    EXPECT_EQ(contents(open(file).package.value().folder / library), "code");
}

TEST_F(PackageCacheTest, WarnsOfTheFileThatSomebodyWroteInto) {
    const auto file = package("a.pt2", "code");
    const auto entry = open(file).package.value().folder;
    std::ostringstream log;
    const auto before = spdlog::default_logger();
    spdlog::set_default_logger(
        std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log)));

    ASSERT_TRUE(open(file).package);
    EXPECT_EQ(log.str(), "") << "nothing is wrong";
    test::write_file(entry / library, "edoc");
    ASSERT_TRUE(open(file).package);
    spdlog::set_default_logger(before);

    EXPECT_THAT(log.str(), HasSubstr("[warning] " + (entry / library).string() + " is not as it was unpacked"));
}

TEST_F(PackageCacheTest, RefusesNamesThatLeadOut) {
    for (const auto* name : {"data/aotinductor/../../../outside", "../outside", "data/aotinductor//x", "a\\b"}) {
        const auto file = folder_.path() / "evil.pt2";
        write_package(file, {{library, "code"}, {name, "x"}});
        const auto error = refusal(file);
        EXPECT_EQ(error.code, ErrorCode::load_failed) << name;
        EXPECT_THAT(error.attempt, HasSubstr("leads out of the package")) << name;
        EXPECT_FALSE(fs::exists(folder_.path() / "outside"));
    }
}

TEST_F(PackageCacheTest, RefusesEveryTruncationAndLeavesNothing) {
    const auto file = package("a.pt2", std::string(5000, 'x'));
    const auto whole = contents(file);
    for (const std::size_t length : {std::size_t{5}, std::size_t{30}, whole.size() / 2, whole.size() - 1}) {
        test::write_file(file, whole.substr(0, length));
        const auto error = refusal(file);
        EXPECT_EQ(error.code, ErrorCode::load_failed) << length << ": " << error.text();
        EXPECT_THAT(error.attempt, HasSubstr("a.pt2")) << length;
        EXPECT_THAT(error.text(), Not(HasSubstr("frame #"))) << length;
        EXPECT_FALSE(error.remedy.empty()) << length;
    }
    EXPECT_TRUE(in_cache("").empty());
}

TEST_F(PackageCacheTest, SweepsWhatADeadProcessLeftAndNothingElse) {
    fs::create_directories(cache_ / ".partial-1-dead" / "data");
    fs::create_directory(cache_ / ".partial-2-alive");
    const UniqueFd alive{::open((cache_ / ".partial-2-alive").c_str(), O_RDONLY | O_CLOEXEC)};
    ASSERT_EQ(::flock(alive.get(), LOCK_EX), 0);
    fs::permissions(cache_, fs::perms::owner_all);

    ASSERT_TRUE(open(package("a.pt2", "code")).package);

    EXPECT_EQ(in_cache(".partial-"), std::vector{cache_ / ".partial-2-alive"});
}

TEST_F(PackageCacheTest, RemovesTheEntryUsedLongestAgoButNoneInUse) {
    const std::string big(1000, 'x');
    auto held = open(package("held.pt2", "1" + big), 2500);
    const auto idle = open(package("idle.pt2", "2" + big), 2500).package.value().folder;
    const auto newest = open(package("new.pt2", "3" + big), 2500).package.value().folder;

    EXPECT_TRUE(fs::exists(held.package.value().folder));
    EXPECT_FALSE(fs::exists(idle));
    EXPECT_TRUE(fs::exists(newest));
    EXPECT_EQ(std::distance(fs::directory_iterator{cache_ / "by-file"}, {}), 2) << "links lead somewhere";
}

TEST_F(PackageCacheTest, RefusesAFolderThatOthersMayWriteInto) {
    fs::create_directory(cache_);
    fs::permissions(cache_, fs::perms::all);
    const auto error = refusal(package("a.pt2", "code"));
    EXPECT_EQ(error.code, ErrorCode::not_permitted);
    EXPECT_THAT(error.remedy, HasSubstr("0700"));
}

}  // namespace
}  // namespace bulkhead::worker
