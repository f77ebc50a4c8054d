#include "supervisor/crash/crash_report.h"

#include <signal.h>
#include <sys/resource.h>

#include <fstream>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "supervisor/base/json_members.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"
#include "tests/support/temporary_folder.h"

namespace bulkhead::supervisor {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

CrashReport crash(std::int64_t time_ms, const std::string& model = "m") {
    CrashReport report;
    report.worker = {model, 0, static_cast<std::uint64_t>(time_ms)};
    report.pid = 42;
    report.time_ms = time_ms;
    report.cause = "SIGSEGV in evil_run (evil.so)";
    report.state = "busy";
    report.exit = {true, SIGSEGV, true};
    report.signal = SIGSEGV;
    report.backtrace = {"evil_run+0x12 (evil.so)"};
    report.log = {"first", "last"};
    report.device = "cpu";
    return report;
}

class CrashReportsTest : public testing::Test {
protected:
    std::vector<std::int64_t> times(const std::string& model = "", std::size_t max = 1000) const {
        std::vector<std::int64_t> result;
        for (const auto& one : reports_.list(model, max)) result.push_back(one.at("time").to_number<std::int64_t>());
        return result;
    }
    std::size_t files() const {
        return static_cast<std::size_t>(
            std::distance(std::filesystem::directory_iterator{path_}, std::filesystem::directory_iterator{}));
    }

    bulkhead::test::TemporaryFolder folder_;
    std::filesystem::path path_ = folder_.path() / "crashes";
    CrashReports reports_{path_};
};

TEST_F(CrashReportsTest, AreListedNewestFirstAndByModel) {
    for (const std::int64_t time : {200, 100, 300}) EXPECT_TRUE(reports_.write(crash(time)));
    EXPECT_TRUE(reports_.write(crash(250, "other")));

    EXPECT_THAT(times(), ElementsAre(300, 250, 200, 100));
    EXPECT_THAT(times("m"), ElementsAre(300, 200, 100));
    EXPECT_THAT(times("m", 2), ElementsAre(300, 200));
    EXPECT_THAT(times("nobody"), IsEmpty());
}

TEST_F(CrashReportsTest, ATextCarriesAllThatIsKnown) {
    CrashReport report = crash(100);
    report.request = "forward(x float32[1,4])";
    report.request_ms = 12;
    report.host_bytes = 1 << 20;
    report.evidence = {"Xid 31"};
    report.worker.model = "../../etc/passwd";
    const auto path = reports_.write(report);
    ASSERT_TRUE(path);
    EXPECT_EQ(path->parent_path(), path_);

    const json::object read = reports_.list("", 1).at(0).as_object();

    EXPECT_EQ(read.at("report").as_string(), path->string());
    EXPECT_EQ(read.at("exit").at("signal").as_string(), "SIGSEGV");
    EXPECT_EQ(read.at("signal").as_string(), "SIGSEGV");
    EXPECT_EQ(read.at("backtrace").at(0).as_string(), "evil_run+0x12 (evil.so)");
    EXPECT_EQ(read.at("request").as_string(), "forward(x float32[1,4])");
    EXPECT_EQ(read.at("request_ms").to_number<int>(), 12);
    EXPECT_EQ(read.at("host_bytes").to_number<int>(), 1 << 20);
    EXPECT_TRUE(read.at("gpu_bytes").is_null());
    EXPECT_EQ(read.at("log").as_array().size(), 2U);
    EXPECT_EQ(read.at("evidence").at(0).as_string(), "Xid 31");
    EXPECT_EQ(std::filesystem::status(*path).permissions(), std::filesystem::perms{0600});
    EXPECT_EQ(std::filesystem::status(path_).permissions(), std::filesystem::perms{0700});
}

TEST_F(CrashReportsTest, TheOldestGoWhenThereAreTooMany) {
    const auto surplus = 5;
    const auto kept = static_cast<std::int64_t>(limits::crash_reports_max);
    for (std::int64_t time = 1; time <= kept + surplus; ++time) EXPECT_TRUE(reports_.write(crash(time)));

    EXPECT_EQ(files(), limits::crash_reports_max);
    EXPECT_EQ(times().front(), kept + surplus);
    EXPECT_EQ(times().back(), 1 + surplus);
}

TEST_F(CrashReportsTest, OneThatIsTooBigLosesItsOldestLinesAndAListFitsOneAnswer) {
    CrashReport report = crash(100);
    report.log.assign(100, std::string(4096, 'x'));
    report.log.back() = "the last one";

    const std::string text = report.to_text();

    EXPECT_LE(text.size(), limits::crash_report_bytes_max);
    EXPECT_THAT(text, HasSubstr("the last one"));
    for (report.time_ms = 1; report.time_ms <= 10; ++report.time_ms) EXPECT_TRUE(reports_.write(report));

    const auto list = reports_.list("", 1000);

    EXPECT_LT(json::serialize(list).size(), limits::control_answer_bytes_max);
    EXPECT_GE(list.size(), 2U);
    EXPECT_EQ(list.at(0).at("time").to_number<int>(), 10);
}

TEST_F(CrashReportsTest, WhatElseLiesInTheFolderIsNeitherShownNorRemoved) {
    ASSERT_TRUE(reports_.write(crash(100)));
    std::ofstream{path_ / "notes.txt"} << "mine";
    std::ofstream{path_ / "0000000000200-m-0-1.json"} << "{ cut off";
    std::ofstream{path_ / "0000000000300-m-0-1.json"} << "[1,2]";
    std::ofstream{path_ / "0000000000400-m-0-1.json"} << R"({"model":7,"cause":"x"})";
    std::ofstream{path_ / "0000000000500-m-0-1.json"} << std::string(limits::crash_report_bytes_max + 1, ' ');
    std::filesystem::create_symlink("/dev/zero", path_ / "0000000000600-m-0-1.json");
    std::filesystem::create_directory(path_ / "0000000000700-m-0-1.json");

    EXPECT_THAT(times(), ElementsAre(100));
    EXPECT_TRUE(reports_.write(crash(800)));

    EXPECT_THAT(times(), ElementsAre(800, 100));
    EXPECT_TRUE(std::filesystem::exists(path_ / "notes.txt"));
}

TEST_F(CrashReportsTest, AFolderThatCannotBeMadeCostsTheReportAndNothingElse) {
    std::ofstream{path_} << "a file where the folder should be";

    EXPECT_FALSE(reports_.write(crash(100)));
    EXPECT_THAT(times(), IsEmpty());

    std::filesystem::remove(path_);
    std::filesystem::create_directory_symlink(folder_.path(), path_);
    EXPECT_FALSE(reports_.write(crash(200))) << "no link is followed";

    std::filesystem::remove(path_);
    EXPECT_TRUE(reports_.write(crash(300)));
}

TEST_F(CrashReportsTest, AFullDiskLeavesNoHalfReport) {
    ASSERT_TRUE(reports_.write(crash(100)));
    rlimit before{};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
    const auto former = ::signal(SIGXFSZ, SIG_IGN);
    const rlimit full{64, before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);

    EXPECT_FALSE(reports_.write(crash(200)));
    EXPECT_FALSE(reports_.write(crash(300)));

    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
    ::signal(SIGXFSZ, former);
    EXPECT_EQ(files(), 1U);
    EXPECT_THAT(times(), ElementsAre(100));

    std::ofstream{path_ / ".unfinished"} << std::string(1 << 20, 'x');  // a killed supervisor's
    EXPECT_TRUE(reports_.write(crash(400)));
    EXPECT_EQ(files(), 2U);
    EXPECT_THAT(times(), ElementsAre(400, 100));
}

TEST(CrashReport, FramesBecomeReadable) {
    EXPECT_EQ(readable_frame("/cache/ab/evil.so(_ZN4evil3runEPKfi+0x1f) [0x7f0012345678]"),
              "evil::run(float const*, int)+0x1f (evil.so)");
    EXPECT_EQ(readable_frame("/lib/libc.so.6(abort+0xd3) [0x7f]"), "abort+0xd3 (libc.so.6)");
    EXPECT_EQ(readable_frame("./program(+0x1234) [0x55]"), "+0x1234 (program)");
    EXPECT_EQ(readable_frame("[0x7ffc0]"), "[0x7ffc0]");
    EXPECT_EQ(readable_frame("no bracket (at all"), "no bracket (at all");
    EXPECT_LE(readable_frame("l(" + std::string(100'000, 'S') + "+0x1)").size(), limits::crash_frame_bytes_max + 100);
}

TEST(CrashReport, WhatASymbolStandsForIsBounded) {
    std::string symbol = "_Z1f1tI1xS0_E";  // f(t<t<…>, t<…>>): each level has the one
                                           // before it twice
    for (const char level : std::string{"123456789A"}) symbol += fmt::format("S_IS{0}_S{0}_E", level);
    ASSERT_GT(symbol.size(), limits::crash_demangled_bytes_max);
    EXPECT_EQ(readable_frame("x.so(" + symbol + "+0x1)"), symbol + "+0x1 (x.so)");
}

TEST(CrashReport, TheCulpritIsTheFirstFrameThatIsNotTheRuntimes) {
    EXPECT_EQ(culprit({"evil_run+0x12 (evil.so)", "main+0x3 (worker)"}), "evil_run (evil.so)");
    EXPECT_EQ(culprit({"pthread_kill+0x1 (libc.so.6)", "abort+0xd3 (libc.so.6)",
                       "std::terminate()+0x1 (libstdc++.so.6)", "evil::run(int)+0x1f (evil.so)"}),
              "evil::run(int) (evil.so)");
    EXPECT_EQ(culprit({"+0x1234 (program)"}), "+0x1234 (program)") << "an offset says more than no name";
    EXPECT_EQ(culprit({"abort+0xd3 (libc.so.6)"}), "");
    EXPECT_EQ(culprit({}), "");
}

TEST(CrashReport, OomEvidenceClaimsNoMoreThanItKnows) {
    EXPECT_THAT(oom_evidence({}, true), IsEmpty());
    EXPECT_THAT(oom_evidence({0, 4, 4}, true), IsEmpty());
    EXPECT_THAT(oom_evidence({1, 4, 5}, true), ElementsAre(HasSubstr("in this worker's cgroup")));
    EXPECT_THAT(oom_evidence({{}, 4, 5}, true),
                ElementsAre(testing::AllOf(HasSubstr("ran during its life"), Not(HasSubstr("ended it")))));
    EXPECT_THAT(oom_evidence({{}, 4, 5}, false), IsEmpty()) << "its end is explained already";
    EXPECT_THAT(oom_evidence({{}, {}, 5}, true), IsEmpty()) << "nobody knows how many there were before";
}

TEST(CrashReport, TheKernelsCountOfOomKillsIsRead) { EXPECT_TRUE(machine_oom_kills().has_value()); }

TEST(PythonTraceback, IsOfTheThreadThatDiedInnermostFirst) {
    EXPECT_THAT(
        python_frames(
            {"info: ready after 86 ms on cpu", "Fatal Python error: Aborted", "",
             "Thread 0x00007f70e45ff6c0 (most recent call first):", "  File \"/lib/selectors.py\", line 468 in select",
             "",
             "Current thread 0x00007f70e5e41b80 (most recent call first):", "  File \"/x/beeper.py\", line 20 in speak",
             "  File \"/b/host.py\", line 151 in _stream", "", "Extension modules: numpy (total: 1)"}),
        ElementsAre("speak (beeper.py:20)", "_stream (host.py:151)"));
}

TEST(PythonTraceback, IsEmptyWhereNoneWasWritten) {
    EXPECT_THAT(python_frames({}), IsEmpty());
    EXPECT_THAT(python_frames({"Fatal Python error: Aborted"}), IsEmpty());
    EXPECT_THAT(python_frames({"Fatal Python error: Aborted",
                               "Current thread 0x1 (most recent call first):", "  File \"/x.py\", of no line"}),
                IsEmpty());
}

TEST(PythonTraceback, ItsTitleNamesTheSignal) {
    EXPECT_EQ(fatal_signal("Fatal Python error: Segmentation fault"), SIGSEGV);
    EXPECT_EQ(fatal_signal("Fatal Python error: Floating-point exception"), SIGFPE);
    for (const char* other : {"Segmentation fault", "Fatal Python error: init_sys_streams", "Fatal Python error: ", ""})
        EXPECT_EQ(fatal_signal(other), std::nullopt) << other;
}

}  // namespace
}  // namespace bulkhead::supervisor
