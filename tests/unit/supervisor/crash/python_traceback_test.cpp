#include "supervisor/crash/crash_report.h"

#include <csignal>

#include <gmock/gmock.h>

namespace bulkhead::supervisor {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

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
