/// What a new supervisor knows of lines that a former one wrote.

#include "supervisor/log/model_log.h"

#include <fstream>

#include <gtest/gtest.h>

#include "supervisor/base/limits.h"
#include "tests/support/temporary_folder.h"

namespace bulkhead::supervisor {
namespace {

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
}

TEST(ModelLogReadBack, LeavesOutWhatAFormerDaemonWrote) {
    const bulkhead::test::TemporaryFolder folder;
    const LogStore store{folder.path(), std::make_shared<LogWriter>()};
    ModelLog former{"m", store};
    former.append(line(1'700'000'000'000, "another daemon's"));
    former.append(line(1'700'000'005'000, "ours"));
    ModelLog next{"m", store};
    ASSERT_TRUE(store.writer->flush());
    next.restore(ModelLog::read_back(folder.path(), "m", 1'700'000'001'000));
    ASSERT_EQ(next.tail(10).size(), 1U);
    EXPECT_EQ(next.last_line(3, 7), "ours");
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

    ModelLog none{"other", store};
    ASSERT_TRUE(store.writer->flush());
    none.restore(ModelLog::read_back(folder.path(), "other", 0));
    EXPECT_TRUE(none.tail(10).empty());
}

}  // namespace
}  // namespace bulkhead::supervisor
