/// A writer whose target takes its time, or never comes back.

#include "supervisor/log/log_writer.h"

#include <condition_variable>
#include <mutex>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {
namespace {

using testing::ElementsAre;
using testing::EndsWith;
using testing::StartsWith;

/// Takes nothing while it is shut.
class Gate : public LogTarget {
public:
    ~Gate() override { open(); }
    void append(std::string_view lines) override {
        std::unique_lock lock{mutex_};
        ++asked_;
        changed_.notify_all();
        changed_.wait(lock, [&] { return open_; });
        text_ += lines;
    }
    void open() {
        const std::lock_guard lock{mutex_};
        open_ = true;
        changed_.notify_all();
    }
    void wait_until_asked() {
        std::unique_lock lock{mutex_};
        changed_.wait(lock, [&] { return asked_ > 0; });
    }
    std::string text() {
        const std::lock_guard lock{mutex_};
        return text_;
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool open_ = false;
    int asked_ = 0;
    std::string text_;
};

TEST(LogWriter, WritesEverythingInOrderAndEnds) {
    const auto a = std::make_shared<Gate>();
    const auto b = std::make_shared<Gate>();
    a->open();
    b->open();
    std::string expected;
    LogWriter writer;
    for (int i = 0; i < 10'000; ++i) {
        const std::string line = fmt::format("line {}\n", i);
        writer.append(a, line);
        if (i % 3 == 0) writer.append(b, "b\n");
        expected += line;
    }
    EXPECT_TRUE(writer.end());
    EXPECT_EQ(a->text(), expected);
    EXPECT_EQ(b->text().size(), 2U * 3'334);
    EXPECT_EQ(writer.lost(), 0U);
    writer.append(a, "late\n");
    EXPECT_EQ(a->text(), expected) << "it has ended";
}

TEST(LogWriter, HoldsNobodyUpAndTellsWhatTheBoundHasCost) {
    const auto gate = std::make_shared<Gate>();
    LogWriter writer;
    writer.append(gate, "first\n");
    gate->wait_until_asked();
    const std::string line = std::string(1'023, 'x') + "\n";
    const std::uint64_t lines = 3 * limits::log_waiting_bytes_max / line.size();
    for (std::uint64_t i = 0; i < lines; ++i) writer.append(gate, line);
    writer.append(gate, "last\n");
    const std::uint64_t lost = writer.lost();
    EXPECT_GE(lost, lines - limits::log_waiting_bytes_max / line.size());
    EXPECT_LT(lost, lines);

    gate->open();
    EXPECT_TRUE(writer.flush());

    const std::string text = gate->text();
    EXPECT_THAT(text, StartsWith(fmt::format("first\n({} lines are missing here", lost)));
    EXPECT_THAT(text, EndsWith(line + "last\n")) << "the newest are kept";
    EXPECT_EQ(static_cast<std::uint64_t>(std::count(text.begin(), text.end(), '\n')), 1 + 1 + (lines - lost) + 1);
    EXPECT_LE(text.size(), limits::log_waiting_bytes_max + 1'024);
}

TEST(LogWriter, OneOfATargetThatHangsIsLeftBehind) {
    const auto gate = std::make_shared<Gate>();
    {
        LogWriter writer;
        writer.append(gate, "held\n");
        gate->wait_until_asked();
        EXPECT_FALSE(writer.end()) << "whoever ends knows that a thread is left";
        EXPECT_FALSE(writer.end()) << "it still is";
    }
    gate->open();  // it comes back, and finds nothing to do
}

TEST(LogWriter, OfFilesThatWaitOnlyTheNewestIsWritten) {
    const auto gate = std::make_shared<Gate>();
    std::vector<std::string> saved;
    LogWriter writer;
    writer.append(gate, "held\n");
    gate->wait_until_asked();
    for (int i = 0; i < 1'000; ++i) writer.save("state", [&saved, i] { saved.push_back(fmt::format("state {}", i)); });
    writer.save("other", [&saved] { saved.emplace_back("other"); });
    gate->open();
    EXPECT_TRUE(writer.flush());
    EXPECT_THAT(saved, ElementsAre("other", "state 999"));
}

}  // namespace
}  // namespace bulkhead::supervisor
