#include "clients/cli/top/top.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <string>

#include "clients/cli/text/json_access.h"
#include "clients/cli/text/limits.h"
#include "clients/cli/text/output.h"
#include "clients/cli/text/terminal.h"
#include "clients/cli/top/feed.h"
#include "clients/cli/top/frame.h"
#include "clients/cli/top/keys.h"
#include "clients/cli/top/terminal_screen.h"

namespace bulkhead::cli::top {
namespace {

using namespace std::chrono_literals;
using Clock = Feed::Clock;

constexpr auto redraw_pause = 250ms;  ///< between two frames caused by events
constexpr auto key_pause = 50ms;      ///< after this, a lone escape character is the key

bool has_utf8() {
    for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
        const char* value = std::getenv(name);
        if (value == nullptr || *value == '\0') continue;
        const std::string_view locale{value};
        return locale.ends_with("UTF-8") || locale.ends_with("utf8") || locale.ends_with("UTF8");
    }
    return false;
}

/// Throws  ErrorException if no daemon answers
void find_daemon(const std::filesystem::path& socket) { (void)ControlConnection::connect(socket).value(); }

int milliseconds_until(Clock::time_point when) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(when - Clock::now()).count();
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
}

short wanted(const Feed& feed) { return static_cast<short>(feed.has_unsent() ? POLLIN | POLLOUT : POLLIN); }

/// Waits for the next answers. Throws  ErrorException, as `ControlClient`
Sampler::Answers next_answers(Feed& feed) {
    const Clock::time_point until = Clock::now() + limits::answer;
    for (;;) {
        feed.work(Clock::now());
        if (auto answers = feed.take_answers()) return std::move(*answers);
        const Clock::time_point now = Clock::now();
        if (feed.fd() < 0)
            throw ErrorException{{ErrorCode::not_running, feed.trouble(now), "start it: bulkhead up FLEET.yaml"}};
        if (now >= until)
            throw ErrorException{
                {ErrorCode::deadline_exceeded, "waiting for the daemon's answer", "look at the daemon's log"}};
        pollfd ready{feed.fd(), wanted(feed), 0};
        ::poll(&ready, 1, milliseconds_until(std::min(feed.due(), until)));
    }
}

/// The rows of `fleet.status` with their rates, the ledger, and the GPUs.
json::object document(const Sampler::Answers& answers, const Snapshot& snapshot) {
    json::array models = array_member(answers.status, "models");
    for (std::size_t i = 0; i < std::min(models.size(), snapshot.workers.size()); ++i) {
        const WorkerRow& row = snapshot.workers[i];
        json::object& model = models[i].as_object();
        model["requests_per_second"] = row.requests_per_s;
        model["tokens_per_second"] = row.tokens_per_s ? json::value(*row.tokens_per_s) : json::value(nullptr);
    }
    return {{"time", snapshot.time_ms},
            {"models", std::move(models)},
            {"devices", array_member(answers.memory, "devices")},
            {"gpus", array_member(answers.gpus, "gpus")}};
}

View plain_view() {
    constexpr std::size_t columns_of_a_file = 160;
    return {.columns = is_terminal(stdout) ? terminal_width(stdout) : columns_of_a_file,
            .rows = 0,
            .colours = Style::of(stdout).colours,
            .utf8 = has_utf8()};
}

std::string text_of(const Frame& frame, bool colours) {
    std::string text;
    for (const Line& line : frame) text += line.painted(colours) + "\n";
    return text;
}

/// One user's screen: takes keys, signals and answers; draws frames.
class Session {
public:
    Session(const std::filesystem::path& socket, TerminalScreen& terminal, Signals& signals)
        : feed_{socket}, terminal_{terminal}, signals_{signals}, style_{Style::of(stdout)}, utf8_{has_utf8()} {}

    /// Returns  the signal that ended it; 0 if the user quit
    int run() {
        for (;;) {
            feed_.work(Clock::now());
            take();
            draw_if_due();
            std::array<pollfd, 3> ready{{{STDIN_FILENO, POLLIN, 0}, {signals_.fd(), POLLIN, 0}, {feed_.fd(), wanted(feed_), 0}}};
            ::poll(ready.data(), ready.size(), milliseconds_until(wake_at()));
            if (const auto ended = take_signals()) return *ended;
            if (ready[0].revents != 0 && !read_keys()) return 0;
            if (press_keys(ready[0].revents == 0)) return 0;
        }
    }

private:
    [[nodiscard]] Clock::time_point wake_at() const {
        Clock::time_point when = std::min(feed_.due(), Clock::now() + 1s);  // for the clock and the ages shown
        if (changed_) when = std::min(when, drawn_at_ + redraw_pause);
        if (keys_.is_waiting()) when = std::min(when, Clock::now() + key_pause);
        return when;
    }

    void take() {
        if (auto answers = feed_.take_answers()) {
            screen_.snapshot = sampler_.take(*answers, read_machine_memory(), unix_ms());
            at_once_ = true;
        }
        for (const json::object& event : feed_.take_events()) {
            screen_.add_event(event);
            changed_ = true;
        }
        for (Outcome& outcome : feed_.take_outcomes()) {
            screen_.tell(std::move(outcome.text), outcome.is_bad);
            at_once_ = true;
        }
        if (std::string trouble = feed_.trouble(Clock::now()); trouble != screen_.trouble) {
            screen_.trouble = std::move(trouble);
            at_once_ = true;
        }
    }

    void draw_if_due() {
        const Clock::time_point now = Clock::now();
        if (!at_once_ && (!changed_ || now < drawn_at_ + redraw_pause)) return;
        const TerminalScreen::Size size = terminal_.size();
        at_once_ = changed_ = false;
        drawn_at_ = now;
        const View view{.columns = size.columns, .rows = size.rows, .colours = style_.colours, .utf8 = utf8_};
        terminal_.show(draw(screen_, view)).value();
    }

    std::optional<int> take_signals() {
        while (const int number = signals_.take()) {
            at_once_ = true;
            if (number == SIGWINCH) {
                terminal_.forget();
            } else if (number == SIGTSTP) {
                terminal_.leave();
                ::raise(SIGSTOP);
                terminal_.enter();
            } else {
                return number;
            }
        }
        return std::nullopt;
    }

    /// False if the terminal has closed.
    bool read_keys() {
        std::array<char, 256> bytes;
        const ssize_t count = ::read(STDIN_FILENO, bytes.data(), bytes.size());
        if (count <= 0) return count < 0 && (errno == EINTR || errno == EAGAIN);
        keys_.feed({bytes.data(), static_cast<std::size_t>(count)});
        return true;
    }

    /// True if the user quits.
    bool press_keys(bool at_rest) {
        while (const auto key = keys_.next(at_rest)) {
            at_once_ = true;
            if (key->name == Key::Name::redraw) terminal_.forget();
            Effect effect = screen_.press(*key);
            if (effect.quit) return true;
            if (!effect.order) continue;
            const Result<> sent = feed_.carry_out(*effect.order);
            screen_.tell(sent ? effect.order->model + ": asked the daemon" : one_line(sent.error().attempt), !sent);
        }
        return false;
    }

    Feed feed_;
    TerminalScreen& terminal_;
    Signals& signals_;
    const Style style_;
    const bool utf8_;
    Sampler sampler_;
    Screen screen_;
    KeyReader keys_;
    bool at_once_ = true;   ///< draw without delay
    bool changed_ = false;  ///< draw after `redraw_pause`
    Clock::time_point drawn_at_{};
};

/// Returns  the signal that ended it; 0 if the user quit. Restores the terminal.
int run_session(const std::filesystem::path& socket) {
    Signals signals = Signals::open().value();
    TerminalScreen terminal = TerminalScreen::open(Style::of(stdout).colours).value();
    return Session{socket, terminal, signals}.run();
}

}  // namespace

bool has_screen() {
    const char* terminal = std::getenv("TERM");
    return is_terminal(stdin) && is_terminal(stdout) && terminal != nullptr && std::string_view{terminal} != "dumb";
}

int show_once(const std::filesystem::path& socket, bool as_json) {
    find_daemon(socket);
    Feed feed{socket};
    Sampler sampler;
    Screen screen;
    (void)sampler.take(next_answers(feed), read_machine_memory(), unix_ms());
    const Sampler::Answers answers = next_answers(feed);  // a second later
    screen.snapshot = sampler.take(answers, read_machine_memory(), unix_ms());
    if (as_json) return print_json(document(answers, screen.snapshot));
    const View view = plain_view();
    return print(text_of(draw(screen, view), view.colours));
}

int print_rows(const std::filesystem::path& socket) {
    find_daemon(socket);
    Feed feed{socket};
    Sampler sampler;
    Screen screen;
    const View view = plain_view();
    for (;;) {
        screen.snapshot = sampler.take(next_answers(feed), read_machine_memory(), unix_ms());
        screen.events.clear();
        for (const json::object& event : feed.take_events()) screen.add_event(event);
        print(text_of(draw(screen, view), view.colours) + "\n");
    }
}

int run_screen(const std::filesystem::path& socket) {
    find_daemon(socket);
    try {
        if (const int signal = run_session(socket); signal != 0) ::raise(signal);  // for the shell's exit status
        return 0;
    } catch (...) {
        throw;  // caught so that unwinding restores the terminal
    }
}

}  // namespace bulkhead::cli::top
