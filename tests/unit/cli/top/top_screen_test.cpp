/// What keys do to `top`'s screen, and how a frame of it looks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "clients/cli/text/terminal.h"
#include "clients/cli/top/frame.h"
#include "clients/cli/top/keys.h"

namespace bulkhead::cli::top {
namespace {

using testing::ElementsAre;
using testing::Each;
using testing::HasSubstr;
using testing::Le;
using testing::Not;

constexpr std::uint64_t one_mib = 1024 * 1024;

WorkerRow worker(std::string name, std::string state, double requests_per_s = 0) {
    WorkerRow row;
    row.name = std::move(name);
    row.state = std::move(state);
    row.device = "cpu";
    row.requests_per_s = requests_per_s;
    if (row.state != "stopped") row.bytes = 250 * one_mib;
    return row;
}

Screen three_models() {
    Screen screen;
    screen.snapshot.workers = {worker("minilm", "ready"), worker("smollm2", "busy", 12.5), worker("vad", "stopped")};
    return screen;
}

Effect press(Screen& screen, std::string_view keys) {
    KeyReader reader;
    reader.feed(keys);
    Effect last;
    while (const auto key = reader.next(true)) last = screen.press(*key);
    return last;
}

std::vector<std::string> names(const Screen& screen) {
    std::vector<std::string> all;
    for (const WorkerRow* row : screen.rows()) all.push_back(row->name);
    return all;
}

std::vector<std::string> lines_of(const Frame& frame) {
    std::vector<std::string> lines;
    for (const Line& line : frame) lines.push_back(line.text());
    return lines;
}

TEST(TopKeys, AreReadWholeAlsoWhenTheyComeInPieces) {
    KeyReader reader;
    reader.feed("\x1b");
    EXPECT_EQ(reader.next(false), std::nullopt) << "an arrow, or the key itself";
    reader.feed("[");
    EXPECT_EQ(reader.next(false), std::nullopt);
    reader.feed("Bq\xc3");
    EXPECT_EQ(reader.next(false)->name, Key::Name::down);
    EXPECT_EQ(reader.next(false)->text, "q");
    EXPECT_EQ(reader.next(false), std::nullopt);
    reader.feed("\xa9\x1b");
    EXPECT_EQ(reader.next(false)->text, "é");
    EXPECT_EQ(reader.next(true)->name, Key::Name::escape);
}

TEST(TopKeys, OfOtherKindsAreTakenAndIgnored) {
    for (const char* bytes : {"\x1b[1;5C", "\x1bOP", "\x1b[<0;3;4M", "\x01", "\xff", "\x1bx", "\xe2\x80\xa8"}) {
        KeyReader reader;
        reader.feed(bytes);
        EXPECT_EQ(reader.next(true)->name, Key::Name::unknown) << bytes;
        EXPECT_FALSE(reader.is_waiting()) << bytes;
    }
}

TEST(TopScreen, AsksBeforeItOrders) {
    struct {
        const char* keys;
        const char* question;
        const char* method;
        const char* params;
    } const table[] = {
        {"l", "Load minilm? y/n", "model.load", R"({"models":["minilm"]})"},
        {"ju", "Unload smollm2? y/n", "model.unload", R"({"models":["smollm2"]})"},
        {"\x1b[B\x1b[Br", "Restart vad? y/n", "model.restart", R"({"models":["vad"]})"},
        {"p", "Pin minilm? y/n", "model.pin", R"({"model":"minilm","pin":true})"},
    };
    for (const auto& [keys, question, method, params] : table) {
        Screen screen = three_models();
        EXPECT_FALSE(press(screen, keys).order) << keys;
        EXPECT_EQ(screen.question, question);
        const Effect effect = press(screen, "y");
        ASSERT_TRUE(effect.order) << keys;
        EXPECT_EQ(effect.order->method, method);
        EXPECT_EQ(boost::json::serialize(effect.order->params), params);
    }
    Screen pinned = three_models();
    pinned.snapshot.workers[0].pinned = true;
    press(pinned, "p");
    EXPECT_EQ(boost::json::serialize(press(pinned, "y").order->params), R"({"model":"minilm","pin":false})");
}

TEST(TopScreen, EveryAnswerButYesMeansNo) {
    for (const char* answer : {"n", "q", "\x1b", "\r", "l"}) {
        Screen screen = three_models();
        press(screen, "u");
        const Effect effect = press(screen, answer);
        EXPECT_FALSE(effect.order);
        EXPECT_FALSE(effect.quit);
        EXPECT_FALSE(press(screen, "y").order) << "the question is over";
    }
}

TEST(TopScreen, AQuestionStaysAboutItsModelWhenRowsMove) {
    Screen screen = three_models();
    press(screen, "ju");
    screen.snapshot.workers = {worker("vad", "ready"), worker("minilm", "ready")};
    EXPECT_EQ(press(screen, "y").order->model, "smollm2");
    screen.snapshot.workers.clear();
    press(screen, "u");
    EXPECT_FALSE(press(screen, "y").order) << "without rows there is nothing to unload";
}

TEST(TopScreen, SortsAndFilters) {
    Screen screen = three_models();
    EXPECT_THAT(names(screen), ElementsAre("minilm", "smollm2", "vad"));
    while (screen.sort != Sort::requests) press(screen, "s");
    EXPECT_THAT(names(screen), ElementsAre("smollm2", "minilm", "vad"));
    press(screen, "S");
    EXPECT_THAT(names(screen), ElementsAre("vad", "minilm", "smollm2"));
    press(screen, "/LM");
    EXPECT_THAT(names(screen), ElementsAre("minilm", "smollm2"));
    press(screen, "2\x7f\r");
    EXPECT_THAT(names(screen), ElementsAre("minilm", "smollm2"));
    press(screen, "\x1b");
    EXPECT_EQ(names(screen).size(), 3U);
    press(screen, "/stopped\r");
    EXPECT_THAT(names(screen), ElementsAre("vad")) << "states are searched as well";
}

TEST(TopScreen, LeavesOutEventsThatComeWithEachRequest) {
    Screen screen;
    screen.add_event({{"event", "state"}, {"from", "ready"}, {"to", "busy"}});
    screen.add_event({{"event", "progress"}, {"phase", "reading"}});
    EXPECT_TRUE(screen.events.empty());
    for (int i = 0; i < 100; ++i) screen.add_event({{"event", "state"}, {"from", "stopped"}, {"to", "spawning"}});
    EXPECT_EQ(screen.events.size(), Screen::events_max);
}

Screen golden() {
    Screen screen;
    WorkerRow voice = worker("voice-1", "busy", 3.2);
    voice.bytes = 251 * one_mib;
    voice.p50_ms = 210;
    voice.p99_ms = 340;
    voice.queued = 2;
    WorkerRow idle = worker("voice-2", "ready");
    idle.since_ms = -30'000;
    idle.unload_ms = 90'000;
    idle.pinned = false;
    WorkerRow crashed = worker("voice-3", "backoff");
    crashed.bytes.reset();
    crashed.restarts = 2;
    WorkerRow stopped = worker("voice-4", "stopped");
    stopped.waiting = 1;
    screen.snapshot.workers = {voice, idle, crashed, stopped};
    DeviceRow cpu;
    cpu.name = "cpu";
    cpu.total = 16'000 * one_mib;
    cpu.limit = 600 * one_mib;
    cpu.others = 2'000 * one_mib;
    cpu.parts = {{Part::Kind::resident, "voice-1", 251 * one_mib}, {Part::Kind::reclaiming, "voice-2", 250 * one_mib}};
    screen.snapshot.devices = {cpu};
    screen.events = {"14:05:09.123 voice-2/0#3 unloaded: for voice-4"};
    return screen;
}

TEST(TopFrame, LooksLikeThis) {
    Screen screen = golden();
    EXPECT_THAT(lines_of(draw(screen, {.columns = 80, .rows = 14})), ElementsAre(
        "bulkhead top  2 of 4 ready, 3.2 requests/s, 3 wait",
        "cpu  [=voice-1============~voice-2~~~~~~~~~~~~~........] 501.0 MiB of 600.0 MiB",
        "     = resident 251M  ~ reclaiming 250M  . free 99M  # others' 2.0G",
        "  MODEL     STATE        DEVICE    MEM   REQ/S     P99  QUEUE   IDLE   UNLOAD",
        "> voice-1   busy         cpu      251M     3.2   340ms      2      -        -",
        "  voice-2   ready        cpu      250M       0       -      0    30s   in 90s",
        "  voice-3   backoff      cpu         -       0       -      0      -        -",
        "  voice-4   stopped      cpu         -       0       -    0+1      -        -",
        "", "", "", "",
        "14:05:09.123 voice-2/0#3 unloaded: for voice-4",
        "q quit  ? help  l load  u unload  r restart  p pin  / filter  "));
    EXPECT_THAT(draw(screen, {.columns = 40, .rows = 14})[3].text(),
                AllOf(HasSubstr("STATE"), HasSubstr("REQ/S"), Not(HasSubstr("RST")))) << "the columns that matter";
    EXPECT_THAT(draw(screen, {.columns = 120, .rows = 14})[3].text(), HasSubstr("RST"));
    screen.trouble = "no daemon for 7 s, trying again: connecting";
    const auto away = lines_of(draw(screen, {.columns = 80, .rows = 14}));
    EXPECT_EQ(away[0], screen.trouble);
    EXPECT_THAT(away, testing::Contains(HasSubstr("voice-1"))) << "what was known last stays";
}

TEST(TopFrame, FitsEveryTerminal) {
    for (const std::size_t columns : {1, 20, 40, 60, 80, 120, 300})
        for (const std::size_t rows : {1, 2, 5, 10, 24, 60}) {
            Screen screen = golden();
            for (int i = 0; i < 200; ++i) screen.snapshot.workers.push_back(worker("m" + std::to_string(i), "ready"));
            for (const char* keys : {"", "G", "?", "x/äöü", "\rju"}) {
                press(screen, keys);
                const Frame frame = draw(screen, {.columns = columns, .rows = rows, .colours = true, .utf8 = true});
                EXPECT_EQ(frame.size(), rows) << columns << " x " << rows;
                std::vector<std::size_t> widths;
                for (const Line& line : frame) widths.push_back(line.width());
                EXPECT_THAT(widths, Each(Le(columns))) << columns << " x " << rows << " " << keys;
            }
        }
}

TEST(TopFrame, ScrollsToTheChosenRow) {
    Screen screen;
    for (int i = 0; i < 200; ++i) screen.snapshot.workers.push_back(worker("m" + std::to_string(i), "ready"));
    const View view{.columns = 80, .rows = 24};
    press(screen, "\x1b[F");
    EXPECT_THAT(lines_of(draw(screen, view)), testing::Contains(HasSubstr("> m199")));
    press(screen, "k");
    EXPECT_THAT(lines_of(draw(screen, view)), testing::Contains(HasSubstr("> m198")));
    press(screen, "\x1b[H");
    const auto lines = lines_of(draw(screen, view));
    EXPECT_THAT(lines, testing::Contains(HasSubstr("> m0 ")));
    EXPECT_THAT(lines, Not(testing::Contains(HasSubstr("m199"))));
}

TEST(TopFrame, WithoutColoursHasNoEscapes) {
    Screen screen = golden();
    for (const Line& line : draw(screen, {.columns = 80, .rows = 24}))
        EXPECT_EQ(line.painted(false).find('\x1b'), std::string::npos);
    EXPECT_NE(draw(screen, {.columns = 80, .rows = 24, .colours = true})[1].painted(true).find("\x1b[30;42m"),
              std::string::npos);
}

TEST(TopFrame, OfAFileHasEveryRowAndNoKeys) {
    Screen screen = golden();
    for (int i = 0; i < 200; ++i) screen.snapshot.workers.push_back(worker("m" + std::to_string(i), "ready"));
    const auto lines = lines_of(draw(screen, {.columns = 160, .rows = 0}));
    EXPECT_THAT(lines, testing::Contains(testing::StartsWith("m199")));
    EXPECT_THAT(lines, Not(testing::Contains(HasSubstr("quit"))));
}

}  // namespace
}  // namespace bulkhead::cli::top
