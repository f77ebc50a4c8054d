#include "worker/death/backtrace_packet.h"

#include <execinfo.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <span>

namespace bulkhead::worker {
namespace {

constexpr std::size_t frames_max = 48;
/// Frames of the handler itself, before the fault's.
constexpr std::size_t handler_frames_max = 16;
/// LibTorch's mangled names can have many kilobytes; their starts tell enough.
constexpr std::size_t frame_bytes_max = 512;
constexpr std::size_t packet_bytes = 48 * 1024;
static_assert(frames_max * frame_bytes_max * 3 / 2 < packet_bytes, "room for escapes");

int pipe_source = -1;  ///< a pipe: without allocating, glibc writes symbols only to descriptors
int pipe_target = -1;

/// Writes the packet and reserves its last bytes for the end.
class Writer {
public:
    void raw(std::string_view text) noexcept {
        used_ +=
            text.copy(bytes_.data() + used_, bytes_.size() - tail_bytes - std::min(used_, bytes_.size() - tail_bytes));
    }
    void number(int value) noexcept {
        std::array<char, 16> digits{};
        const auto [end, failed] = std::to_chars(digits.data(), digits.data() + digits.size(), value);
        if (failed == std::errc{}) raw({digits.data(), static_cast<std::size_t>(end - digits.data())});
    }
    /// Symbols are ASCII. Other bytes are replaced, so that the JSON has no broken UTF-8.
    void quoted(std::string_view text) noexcept {
        if (used_ + 2 * text.size() + 2 > bytes_.size() - tail_bytes) text = {};
        raw("\"");
        for (const char c : text) {
            if (c == '"' || c == '\\') raw("\\");
            raw(c < ' ' || c > '~' ? std::string_view{"?"} : std::string_view{&c, 1});
        }
        raw("\"");
    }
    std::string_view finish() noexcept {
        used_ += std::string_view{"]}"}.copy(bytes_.data() + used_, tail_bytes);
        return {bytes_.data(), used_};
    }

private:
    static constexpr std::size_t tail_bytes = 2;
    std::array<char, packet_bytes> bytes_;
    std::size_t used_ = 0;
};

Writer writer;
std::array<void*, handler_frames_max + frames_max> addresses;
std::array<char, frame_bytes_max> line;

/// "libtorch_cpu.so(_ZN5torch…+0x1f)[0x7f…]", cut to what fits.
std::string_view symbol_of(void* address) noexcept {
    ::backtrace_symbols_fd(&address, 1, pipe_target);
    std::size_t used = 0;
    std::array<char, 256> part;
    for (ssize_t count = 0; (count = ::read(pipe_source, part.data(), part.size())) > 0;)
        used +=
            std::string_view{part.data(), static_cast<std::size_t>(count)}.copy(line.data() + used, line.size() - used);
    std::string_view text{line.data(), used};
    text = text.substr(0, text.find('\n'));
    const auto folder = text.find_last_of('/');
    return folder == text.npos ? text : text.substr(folder + 1);
}

}  // namespace

void prepare_backtrace() noexcept {
    std::array<int, 2> ends{-1, -1};
    if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) == 0) {
        pipe_source = ends[0];
        pipe_target = ends[1];
    }
    (void)::backtrace(addresses.data(), 1);
}

std::string_view backtrace_packet(int signal, const void* fault) noexcept {
    const int found = ::backtrace(addresses.data(), static_cast<int>(addresses.size()));
    std::span<void*> frames{addresses.data(), static_cast<std::size_t>(std::max(found, 0))};
    const auto start = std::ranges::find(frames, fault);
    frames = frames.subspan(start == frames.end() ? 0 : static_cast<std::size_t>(start - frames.begin()));

    std::array<char, 17> thread{};
    ::prctl(PR_GET_NAME, thread.data());
    writer.raw(R"({"type":"backtrace","signal":)");
    writer.number(signal);
    writer.raw(R"(,"thread":)");
    writer.quoted(thread.data());
    writer.raw(R"(,"frames":[)");
    for (std::size_t i = 0; i < std::min(frames.size(), frames_max); ++i) {
        if (i > 0) writer.raw(",");
        writer.quoted(symbol_of(frames[i]));
    }
    return writer.finish();
}

}  // namespace bulkhead::worker
