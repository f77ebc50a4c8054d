#include "clients/cli/top/top.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/signal_set.hpp>

#include "bulkhead/control.h"
#include "clients/cli/text/json_access.h"
#include "clients/cli/text/output.h"
#include "clients/cli/text/terminal.h"
#include "clients/cli/top/feed.h"
#include "clients/cli/top/frame.h"
#include "clients/cli/top/keys.h"
#include "clients/cli/top/terminal_screen.h"
#include "clients/cpp/base/wait_ready.h"
#include "ipc/base/unique_fd.h"

namespace bulkhead::cli::top {
namespace {

namespace asio = boost::asio;
using namespace std::chrono_literals;
using Clock = Feed::Clock;

constexpr auto redraw_pause = 250ms;  ///< between two frames caused by events
constexpr auto key_pause = 50ms;      ///< after this, a lone escape character is the key
constexpr int more_handlers = 256;    ///< run between two frames, if they are ready

bool has_utf8() {
    for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
        const char* value = std::getenv(name);
        if (value == nullptr || *value == '\0') continue;
        const std::string_view locale{value};
        return locale.ends_with("UTF-8") || locale.ends_with("utf8") || locale.ends_with("UTF8");
    }
    return false;
}

/// Waits for the next answers. Throws  ErrorException, as `ControlClient`
Sampler::Answers next_answers(asio::io_context& loop, Feed& feed) {
    for (;;) {
        if (auto answers = feed.take_answers()) return std::move(*answers);
        if (feed.failure()) throw ErrorException{*feed.failure()};
        loop.run_one();
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
    Session(asio::io_context& loop, UniqueFd input, asio::signal_set& signals, TerminalScreen& terminal,
            const std::filesystem::path& socket)
        : loop_{loop}, input_{loop, input.release()}, signals_{signals}, terminal_{terminal}, feed_{loop, socket},
          style_{Style::of(stdout)}, utf8_{has_utf8()} {}

    /// Returns  the signal that ended it; 0 if the user quit
    int run() {
        await_keys();
        await_signal();
        while (!ended_) {
            take();
            draw_if_due();
            loop_.run_one_until(wake_at());  // runs nothing if that has passed
            for (int more = 0; more < more_handlers && !ended_ && loop_.poll_one() != 0;) ++more;
            if (keys_.is_waiting() && Clock::now() >= keys_came_at_ + key_pause) press_keys(true);
        }
        return *ended_;
    }

private:
    [[nodiscard]] Clock::time_point wake_at() const {
        Clock::time_point when = Clock::now() + 1s;  // for the clock and the ages shown
        if (changed_) when = std::min(when, drawn_at_ + redraw_pause);
        if (keys_.is_waiting()) when = std::min(when, keys_came_at_ + key_pause);
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

    void await_signal() {
        signals_.async_wait([this](boost::system::error_code, int number) {
            at_once_ = true;
            if (number == SIGWINCH) {
                terminal_.forget();
            } else if (number == SIGTSTP) {
                terminal_.leave();
                ::raise(SIGSTOP);
                terminal_.enter();
            } else {
                ended_ = number;
            }
            await_signal();
        });
    }

    void await_keys() {
        input_.async_wait(asio::posix::descriptor_base::wait_read, [this](boost::system::error_code) {
            std::array<char, 256> bytes;
            const ssize_t count = ::read(input_.native_handle(), bytes.data(), bytes.size());
            // The terminal has closed.
            if (count == 0 || (count < 0 && errno != EINTR && errno != EAGAIN)) {
                ended_ = 0;
            } else if (count > 0) {
                keys_.feed({bytes.data(), static_cast<std::size_t>(count)});
                keys_came_at_ = Clock::now();
                press_keys(false);
            }
            await_keys();
        });
    }

    void press_keys(bool at_rest) {
        while (!ended_) {
            const auto key = keys_.next(at_rest);
            if (!key) return;
            at_once_ = true;
            if (key->name == Key::Name::redraw) terminal_.forget();
            Effect effect = screen_.press(*key);
            if (effect.quit) ended_ = 0;
            if (!effect.order) continue;
            const Result<> sent = feed_.carry_out(*effect.order);
            screen_.tell(sent ? effect.order->model + ": asked the daemon" : one_line(sent.error().attempt), !sent);
        }
    }

    asio::io_context& loop_;
    asio::posix::stream_descriptor input_;
    asio::signal_set& signals_;
    TerminalScreen& terminal_;
    Feed feed_;
    const Style style_;
    const bool utf8_;
    Sampler sampler_;
    Screen screen_;
    KeyReader keys_;
    Clock::time_point keys_came_at_{};
    bool at_once_ = false;  ///< draw without delay; before the first answer there is
                            ///< nothing to draw
    bool changed_ = false;  ///< draw after `redraw_pause`
    Clock::time_point drawn_at_{};
    std::optional<int> ended_;  ///< by this signal; 0: by the user
};

/// Returns  the signal that ended it; 0 if the user quit. Restores the terminal.
int run_session(const std::filesystem::path& socket) {
    // Opened again: Asio makes it non-blocking, which the shell's own descriptor must not become.
    UniqueFd input{::open("/proc/self/fd/0", O_RDONLY | O_CLOEXEC | O_NOCTTY)};
    // After `su`, the other is refused.
    if (!input) input = UniqueFd{::open("/dev/tty", O_RDONLY | O_CLOEXEC)};
    if (!input) {
        Error error = system_error("opening the terminal", errno);
        error.remedy = "use --once";
        throw ErrorException{std::move(error)};
    }
    asio::io_context loop;
    asio::signal_set signals{loop, SIGINT, SIGTERM, SIGHUP};
    for (const int number : {SIGQUIT, SIGTSTP, SIGWINCH}) signals.add(number);
    TerminalScreen terminal{Style::of(stdout).colours};
    return Session{loop, std::move(input), signals, terminal, socket}.run();
}

}  // namespace

bool has_screen() {
    const char* terminal = std::getenv("TERM");
    return is_terminal(stdin) && is_terminal(stdout) && terminal != nullptr && std::string_view{terminal} != "dumb";
}

int show_once(const std::filesystem::path& socket, bool as_json) {
    asio::io_context loop;
    Feed feed{loop, socket};
    Sampler sampler;
    Screen screen;
    (void)sampler.take(next_answers(loop, feed), read_machine_memory(), unix_ms());
    const Sampler::Answers answers = next_answers(loop, feed);  // a second later
    screen.snapshot = sampler.take(answers, read_machine_memory(), unix_ms());
    if (as_json) return print_json(document(answers, screen.snapshot));
    const View view = plain_view();
    return print(text_of(draw(screen, view), view.colours));
}

int print_rows(const std::filesystem::path& socket) {
    asio::io_context loop;
    Feed feed{loop, socket};
    Sampler sampler;
    Screen screen;
    const View view = plain_view();
    for (;;) {
        screen.snapshot = sampler.take(next_answers(loop, feed), read_machine_memory(), unix_ms());
        screen.events.clear();
        for (const json::object& event : feed.take_events()) screen.add_event(event);
        print(text_of(draw(screen, view), view.colours) + "\n");
    }
}

int run_screen(const std::filesystem::path& socket) {
    (void)ControlClient::connect(socket).value();  // throws if no daemon answers
    try {
        // For the shell's exit status.
        if (const int signal = run_session(socket); signal != 0) ::raise(signal);
        return 0;
    } catch (...) {
        throw;  // caught so that unwinding restores the terminal
    }
}

}  // namespace bulkhead::cli::top
