#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <array>
#include <csignal>
#include <fstream>
#include <thread>

#include <gmock/gmock.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"
#include "supervisor/log/log_pipe.h"
#include "tests/support/file_text.h"
#include "tests/unit/supervisor/loop.h"
#include "tests/support/temporary_folder.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;

TEST(Escaped, LeavesTextAloneAndShowsWhatCouldDoHarm) {
    EXPECT_EQ(escaped("plain, größer 日本 🚀 \\"), "plain, größer 日本 🚀 \\");
    EXPECT_EQ(escaped("a\nb\tc\rd"), "a\\nb\\tc\\rd");
    EXPECT_EQ(escaped("\x1b[31mred"), "\\x1b[31mred");
    EXPECT_EQ(escaped(std::string_view{"nul\0", 4}), "nul\\x00");
    EXPECT_EQ(escaped("\xff\xc3"), "\\xff\\xc3");                    // no UTF-8
    EXPECT_EQ(escaped("\xc0\xaf"), "\\xc0\\xaf");                    // overlong
    EXPECT_EQ(escaped("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // a surrogate
    EXPECT_EQ(escaped("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // beyond Unicode
    EXPECT_EQ(escaped("\xc2\x9b"), "\\u009b");                       // a C1 control: CSI
    EXPECT_EQ(escaped("\xe2\x80\xae"), "\\u202e");                   // writes backwards from here
}

TEST(CountText, GroupsThousands) {
    EXPECT_EQ(count_text(0), "0");
    EXPECT_EQ(count_text(999), "999");
    EXPECT_EQ(count_text(81'234), "81,234");
    EXPECT_EQ(count_text(1'000'000), "1,000,000");
}

class Splitting : public testing::Test {
protected:
    void feed(std::string_view bytes) { splitter_.feed(bytes, now_, emit_); }

    LineSplitter splitter_;
    LineSplitter::Clock::time_point now_ = LineSplitter::Clock::time_point{} + 1h;
    std::vector<std::string> lines_;
    std::vector<std::string> said_;
    LineSplitter::Emit emit_ = [this](std::string text, bool by_daemon) {
        (by_daemon ? said_ : lines_).push_back(std::move(text));
    };
};

TEST_F(Splitting, JoinsWhatArrivesInPieces) {
    feed("on");
    feed("e\ntwo\r\nthr");
    feed("ee");
    EXPECT_THAT(lines_, ElementsAre("one", "two"));
    splitter_.finish(emit_);
    EXPECT_THAT(lines_, ElementsAre("one", "two", "three"));
}

TEST_F(Splitting, CutsALineThatIsTooLongAndGoesOnWithTheNext) {
    feed(std::string(limits::log_line_bytes_max, 'a') + "\n");
    feed(std::string(10 * limits::log_line_bytes_max, 'b'));
    feed("still b\nnext\n");
    ASSERT_EQ(lines_.size(), 3U);
    EXPECT_EQ(lines_[0].size(), limits::log_line_bytes_max);
    EXPECT_THAT(lines_[1], EndsWith(" … cut"));
    EXPECT_EQ(lines_[1].size(), limits::log_line_bytes_max + std::string{" … cut"}.size());
    EXPECT_EQ(lines_[2], "next");
}

TEST_F(Splitting, DropsAndCountsWhatExceedsItsBudget) {
    for (int i = 0; i < 82'234; ++i) feed("x\n");
    EXPECT_EQ(lines_.size(), limits::log_lines_per_window);
    EXPECT_TRUE(said_.empty());

    now_ += 1s;
    feed("after\n");
    EXPECT_THAT(said_, ElementsAre("… 81,234 lines dropped"));
    EXPECT_EQ(lines_.back(), "after");
}

TEST_F(Splitting, ABurstThatNothingFollowsIsMarkedWhenItsSecondEnds) {
    feed("x\n");
    EXPECT_EQ(splitter_.mark_due(), std::nullopt);
    for (std::size_t i = 0; i < limits::log_lines_per_window; ++i) feed("x\n");
    ASSERT_EQ(splitter_.mark_due(), now_ + limits::log_budget_window);
    splitter_.end_window(emit_);
    EXPECT_THAT(said_, ElementsAre("… 1 line dropped"));
    EXPECT_EQ(splitter_.mark_due(), std::nullopt);

    now_ += limits::log_budget_window;
    feed("after\n");
    EXPECT_EQ(said_.size(), 1U) << "told once";
}

TEST_F(Splitting, BoundsBytesTooAndTellsAtTheEnd) {
    for (int i = 0; i < 1'000; ++i) feed(std::string(4'000, 'x') + "\n");
    EXPECT_LE(lines_.size() * 4'001, limits::log_bytes_per_window);
    splitter_.finish(emit_);
    EXPECT_THAT(said_, ElementsAre(HasSubstr("lines dropped")));
}

TEST(ModelLog, KeepsTheLastLinesInBoundedMemory) {
    ModelLog log{"m", std::nullopt};
    for (int i = 0; i < 5'000; ++i) log.append({i, 0, 1, false, "line " + std::to_string(i)});
    EXPECT_EQ(log.tail(1'000'000).size(), limits::log_lines_kept);
    EXPECT_EQ(log.tail(1)[0].at("text").as_string(), "line 4999");
    EXPECT_EQ(log.last_line(0, 1), "line 4999");
    EXPECT_EQ(log.last_line(0, 2), "");

    for (int i = 0; i < 2'000; ++i) log.append({i, 0, 1, false, std::string(4'096, 'x')});
    EXPECT_LE(log.tail(1'000'000).size() * 4'096, limits::log_bytes_kept);
}

TEST(ModelLog, ItsAnswerFitsIntoOneAnswerWhateverWasPrinted) {
    ModelLog log{"m", std::nullopt};
    for (int i = 0; i < 2'000; ++i) log.append({i, 0, 1, false, std::string(500, '"')});
    EXPECT_LT(json::serialize(log.tail(2'000)).size(), limits::control_answer_bytes_max);
    EXPECT_FALSE(log.tail(2'000).empty());
}

TEST(ModelLog, WritesAFileThatRotatesAndNeverLeavesItsFolder) {
    const bulkhead::test::TemporaryFolder folder;
    const LogStore store{folder.path(), std::make_shared<LogWriter>()};
    ModelLog log{"../evil", store};
    for (int i = 0; i < 30'000; ++i)
        log.append({1'700'000'000'123, 2, 7, false, "a line of about a hundred bytes " + std::string(60, 'x')});
    ASSERT_TRUE(store.writer->flush());

    const auto file = folder.path() / "%2e.%2fevil.log";
    EXPECT_LE(std::filesystem::file_size(file), limits::log_file_bytes_max);
    EXPECT_LE(std::filesystem::file_size(file.string() + ".1"), limits::log_file_bytes_max);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator{folder.path()}, {}), 2);
    struct stat status {};
    ASSERT_EQ(::stat(file.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600U);
    std::string first;
    std::getline(std::ifstream{file} >> std::ws, first);
    EXPECT_THAT(first, testing::StartsWith("2023-11-14T22:13:20.123 2#7 a line"));
}

TEST(LogFile, OnAFullDiskWholeLinesAreLost) {
    const bulkhead::test::TemporaryFolder folder;
    const auto path = folder.path() / "m.log";
    LogFile file{path};
    file.append("first\n");
    rlimit former{};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &former), 0);
    rlimit full = former;
    full.rlim_cur = 16;
    const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);  // no file may grow beyond that, as on a disk
                                                     // that is full there
    file.append("second\nthird\n");
    ::setrlimit(RLIMIT_FSIZE, &former);
    std::signal(SIGXFSZ, ignored);
    file.append("fourth\n");
    EXPECT_EQ(bulkhead::test::file_text(path), "first\nsecond\nfourth\n");
}

TEST(ModelLog, GoesOnInMemoryWhereNothingCanBeWritten) {
    const LogStore store{"/proc/no/such/folder", std::make_shared<LogWriter>()};
    ModelLog log{"m", store};
    log.append({1, 0, 1, false, "kept"});
    ASSERT_TRUE(store.writer->flush());
    EXPECT_EQ(log.tail(10).size(), 1U);
}

LogLine line(std::int64_t time_ms, std::string text, bool by_daemon = false) {
    return {time_ms, 3, 7, by_daemon, std::move(text)};
}

TEST(ModelLogReadBack, GivesWhatTheFormerSupervisorHad) {
    const bulkhead::test::TemporaryFolder folder;
    const LogStore store{folder.path(), std::make_shared<LogWriter>()};
    ModelLog former{"m", store};
    former.append(line(1'700'000'000'001, "loading"));
    former.append(line(1'700'000'000'999, "crashed: SIGSEGV", true));
    former.append(line(1'700'000'001'000, "daemon: says who?"));
    former.append(line(1'700'000'001'000, ""));

    ModelLog next{"m", store};
    ASSERT_TRUE(store.writer->flush());
    next.restore(ModelLog::read_back(folder.path(), "m", 1'700'000'000'000));
    EXPECT_EQ(next.tail(10), former.tail(10)) << "what a worker prints cannot pass for the daemon's word";
    EXPECT_EQ(next.last_line(3, 7), "");
    EXPECT_EQ(next.tail(10).size(), 4U);
    EXPECT_EQ(ModelLog::read_back(folder.path(), "m", 1'700'000'000'500).size(), 3U) << "no former daemon's";
    EXPECT_TRUE(ModelLog::read_back(folder.path(), "other", 0).empty());
}

TEST(ModelLogReadBack, IsBoundedAndSkipsWhatItCannotRead) {
    const bulkhead::test::TemporaryFolder folder;
    const LogStore store{folder.path(), std::make_shared<LogWriter>()};
    ModelLog former{"m", store};
    for (int i = 0; i < 5'000; ++i) former.append(line(1'700'000'000'000 + i, std::string(100, 'x')));
    ASSERT_TRUE(store.writer->flush());
    std::ofstream{folder.path() / "m.log", std::ios::app} << "garbage\n2023-13-99Tx\n\n#\n"
                                                          << std::string(300, '9') << "\n";
    ModelLog next{"m", store};
    ASSERT_TRUE(store.writer->flush());
    next.restore(ModelLog::read_back(folder.path(), "m", 0));
    EXPECT_GT(next.tail(2'000).size(), 100U);
    EXPECT_LT(next.tail(2'000).size(), limits::log_read_back_bytes / 100);
}

class LogPipeTest : public testing::Test {
protected:
    void print(std::string_view text) {
        ASSERT_EQ(::write(worker_.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
    }

    boost::asio::io_context io_;
    ModelLog log_{"m", std::nullopt};
    UniqueFd worker_;  ///< its end of the pipe
    std::shared_ptr<LogPipe> capture_ = [this] {
        std::array<int, 2> ends{};
        if (::pipe2(ends.data(), O_CLOEXEC) != 0) std::abort();
        worker_ = UniqueFd{ends[1]};
        return LogPipe::open(io_, UniqueFd{ends[0]}, {"m", 0, 1}, log_);
    }();
};

TEST_F(LogPipeTest, AWorkerThatPrintsAHundredMegabytesIsNeverBlockedForGood) {
    std::atomic<bool> written = false;
    std::thread worker{[&] {
        const std::string block(1'000'000, 'y');
        for (int i = 0; i < 100; ++i)
            for (std::size_t sent = 0; sent < block.size();)
                sent += static_cast<std::size_t>(
                    std::max<ssize_t>(0, ::write(worker_.get(), block.data() + sent, block.size() - sent)));
        (void)!::write(worker_.get(), "\ndone\n", 6);
        written = true;
    }};
    EXPECT_TRUE(test::run_until(io_, [&] { return written.load(); }));
    worker.join();
    worker_.reset();
    EXPECT_TRUE(test::run_until(io_, [&] { return log_.last_line(0, 1) == "done"; }));
    EXPECT_EQ(log_.tail(10).size(), 2U);
}

TEST_F(LogPipeTest, ABurstIsMarkedThoughItsWorkerPrintsNothingMore) {
    std::string burst;
    for (std::size_t i = 0; i < 2 * limits::log_lines_per_window; ++i) burst += "x\n";
    print(burst);
    EXPECT_TRUE(test::run_until(io_, [&] {
        return json::serialize(log_.tail(1)).find(" lines dropped") != std::string::npos;
    })) << json::serialize(log_.tail(1));
}

TEST_F(LogPipeTest, FinishTakesWhatIsLeftEvenIfAGrandchildHoldsThePipe) {
    print("last words");
    capture_->finish();
    EXPECT_EQ(log_.last_line(0, 1), "last words");
}

}  // namespace
}  // namespace bulkhead::supervisor
