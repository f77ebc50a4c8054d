// Streams recorded speech through a voice activity model over one channel, and draws when someone speaks.

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "bulkhead/channel.h"
#include "bulkhead/control.h"
#include "clients/cpp/examples/resample.h"
#include "clients/cpp/examples/speech_segments.h"
#include "clients/cpp/examples/wav.h"

namespace {

using namespace bulkhead;
using namespace std::chrono_literals;
using example::Segment;
using Clock = std::chrono::steady_clock;

constexpr std::uint32_t rate_hz = 16'000;
constexpr std::size_t chunk_samples = 512;
constexpr std::size_t pause_samples = rate_hz / 2;  ///< between two files
constexpr std::size_t chunks_per_column = 4;        ///< 128 ms of sound
constexpr std::size_t columns_per_row = 78;         ///< 10 s

struct Options {
    std::string model = "silero-vad";
    std::string socket;
    std::string save;
    std::string dump_audio;
    double threshold = 0.5;
    bool realtime = false;
    std::vector<std::string> files;
};

/// All files concatenated, and the place of each.
struct Audio {
    struct Part {
        std::string name;
        std::size_t start;
        std::size_t end;
    };
    std::vector<float> samples;  ///< a whole number of chunks, padded with silence
    std::vector<Part> parts;
};

Result<Audio> read_audio(const std::vector<std::string>& files) {
    Audio audio;
    for (const std::string& file : files) {
        const Result<example::Sound> sound = example::read_wav(file);
        if (!sound) return sound.error();
        if (!audio.parts.empty()) audio.samples.resize(audio.samples.size() + pause_samples);
        const std::vector<float> samples = example::resample(sound->samples, sound->rate_hz, rate_hz);
        const std::size_t start = audio.samples.size();
        audio.samples.insert(audio.samples.end(), samples.begin(), samples.end());
        audio.parts.push_back({std::filesystem::path{file}.filename().string(), start, audio.samples.size()});
    }
    audio.samples.resize((audio.samples.size() + chunk_samples - 1) / chunk_samples * chunk_samples);
    return audio;
}

double seconds(std::size_t samples) { return static_cast<double>(samples) / rate_hz; }

/// Draws the bar as answers arrive: one row per file, and a new one after each 10 s.
class Timeline {
public:
    Timeline(const Audio& audio, double threshold)
        : audio_{audio}, threshold_{threshold}, colour_{::isatty(STDOUT_FILENO) == 1} {}

    void add(std::size_t chunk, float probability) {
        const std::size_t sample = chunk * chunk_samples;
        if (next_part_ < audio_.parts.size() && sample + chunk_samples > audio_.parts[next_part_].start) {
            end_row();
            fmt::print("{}\n", audio_.parts[next_part_++].name);
        } else if (columns_ == columns_per_row) {
            end_row();
        }
        if (columns_ == 0 && chunks_ == 0) fmt::print("{:7.2f} s  ", seconds(sample));
        loudest_ = std::max(loudest_, probability);
        if (++chunks_ == chunks_per_column) draw_column();
    }
    void end_row() {
        if (chunks_ > 0) draw_column();
        if (columns_ > 0) fmt::print("\n");
        columns_ = 0;
    }

private:
    void draw_column() {
        static constexpr std::array<const char*, 9> blocks{" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
        const auto level = static_cast<std::size_t>(std::lround(std::clamp(loudest_, 0.0f, 1.0f) * 8));
        if (colour_)
            fmt::print("\033[{}m{}\033[0m", loudest_ >= threshold_ ? 32 : 90, blocks[level]);
        else
            fmt::print("{}", blocks[level]);
        std::fflush(stdout);
        ++columns_;
        chunks_ = 0;
        loudest_ = 0;
    }

    const Audio& audio_;
    double threshold_;
    bool colour_;
    std::size_t next_part_ = 0;
    std::size_t columns_ = 0;
    std::size_t chunks_ = 0;
    float loudest_ = 0;
};

struct Streamed {
    std::vector<float> probabilities;        ///< one per chunk
    std::vector<Clock::duration> latencies;  ///< from submit to answer
    Clock::duration longest_gap{};           ///< between two answers
};

Result<Streamed> stream(Channel& channel, const Audio& audio, const Options& options) {
    Timeline timeline{audio, options.threshold};
    Streamed streamed;
    const std::array<std::int64_t, 2> shape{1, chunk_samples};
    Result<Input> x = channel.allocate(wire::DType::float32, shape);  // leased once, refilled for each chunk
    if (!x) return x.error();
    const std::array<NamedInput, 1> inputs{{{"x", &*x}}};
    const Request request{.inputs = inputs, .parameters = {{"sr", rate_hz}}};

    const Clock::time_point start = Clock::now();
    Clock::time_point last_answer = start;
    for (std::size_t at = 0; at < audio.samples.size(); at += chunk_samples) {
        const std::size_t chunk = at / chunk_samples;
        if (options.realtime)  // like a microphone: a chunk is complete when its last sample is recorded
            std::this_thread::sleep_until(start +
                                          (chunk + 1) * std::chrono::microseconds{1'000'000 * chunk_samples / rate_hz});
        std::copy_n(audio.samples.begin() + static_cast<std::ptrdiff_t>(at), chunk_samples, x->as<float>().begin());
        const Clock::time_point asked = Clock::now();
        const Result<Reply> reply = channel.infer(request);
        const Clock::time_point answered = Clock::now();
        if (!reply) {
            timeline.end_row();
            return Error{reply.error()}.during(fmt::format("chunk {}", chunk));
        }
        if (reply->outputs.empty() || reply->outputs[0].dtype() != wire::DType::float32 ||
            reply->outputs[0].as<float>().size() != 1)
            return Error{ErrorCode::shape_mismatch,
                         fmt::format("{} does not answer with one float32 probability", options.model),
                         "name a voice activity model with --model"};
        const float probability = reply->outputs[0].as<float>()[0];
        streamed.probabilities.push_back(probability);
        streamed.latencies.push_back(answered - asked);
        if (chunk > 0) streamed.longest_gap = std::max(streamed.longest_gap, answered - last_answer);
        last_answer = answered;
        timeline.add(chunk, probability);
    }
    timeline.end_row();
    return streamed;
}

void print_segments(const Audio& audio, const std::vector<Segment>& segments) {
    for (const Audio::Part& part : audio.parts) {
        std::string line;
        for (const Segment& segment : segments) {
            const bool inside = segment.end > static_cast<std::int64_t>(part.start) &&
                                segment.start < static_cast<std::int64_t>(part.end);
            if (inside)
                line += fmt::format("  {:.2f}-{:.2f} s", static_cast<double>(segment.start) / rate_hz,
                                    static_cast<double>(segment.end) / rate_hz);
        }
        fmt::print("speech in {}:{}\n", part.name, line.empty() ? "  none" : line);
    }
}

double milliseconds(Clock::duration duration) { return std::chrono::duration<double, std::milli>(duration).count(); }

void print_summary(const Audio& audio, Streamed streamed) {
    std::ranges::sort(streamed.latencies);
    const auto percentile = [&](std::size_t percent) {
        return milliseconds(streamed.latencies[(streamed.latencies.size() - 1) * percent / 100]);
    };
    fmt::print(
        "{} chunks, {:.2f} s of sound; latency p50 {:.3f} ms, p99 {:.3f} ms; longest gap between answers {:.3f} ms\n",
        streamed.probabilities.size(), seconds(audio.samples.size()), percentile(50), percentile(99),
        milliseconds(streamed.longest_gap));
}

template <typename Write>
Result<> write_file(const std::string& path, const Write& write) {
    if (path.empty()) return {};
    std::ofstream file{path, std::ios::binary | std::ios::trunc};
    if (file) write(file);
    if (!file.flush()) return system_error(fmt::format("writing {}", path), errno);
    return {};
}

Result<> run(const Options& options) {
    const Result<Audio> audio = read_audio(options.files);
    if (!audio) return audio.error();
    if (audio->samples.empty())
        return Error{ErrorCode::input_invalid, "the files hold no samples", "name files with sound"};
    const Result<> dumped = write_file(options.dump_audio, [&](std::ofstream& file) {
        file.write(reinterpret_cast<const char*>(audio->samples.data()),
                   static_cast<std::streamsize>(audio->samples.size() * sizeof(float)));
    });
    if (!dumped) return dumped;

    std::optional<std::filesystem::path> socket;
    if (!options.socket.empty()) socket = options.socket;
    Result<ControlClient> control = ControlClient::connect(find_socket(socket));
    if (!control) return control.error();
    Result<Channel> channel = Channel::open(*control, options.model, {.client = "vad_timeline", .deadline = {}});
    if (!channel) return channel.error();
    const Result<Streamed> streamed = stream(*channel, *audio, options);
    if (!streamed) return streamed.error();

    print_segments(*audio, example::speech_segments(streamed->probabilities, options.threshold));
    print_summary(*audio, *streamed);
    return write_file(options.save, [&](std::ofstream& file) {
        for (const float probability : streamed->probabilities) file << fmt::format("{:.9g}\n", probability);
    });
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    CLI::App app{"Streams speech through a voice activity model in chunks of 32 ms and draws when somebody speaks."};
    app.add_option("--model", options.model, "a model of the fleet with silero-vad's interface")->capture_default_str();
    app.add_option("--socket", options.socket, "the daemon's control socket; else as `bulkhead` finds it");
    app.add_option("--threshold", options.threshold, "probability from which on a chunk is speech")
        ->check(CLI::Range(0.0, 1.0))
        ->capture_default_str();
    app.add_option("--save", options.save, "write one probability a line to this file");
    app.add_option("--dump-audio", options.dump_audio, "write the samples as streamed: 16 kHz, float32, little-endian");
    app.add_flag("--realtime", options.realtime, "send each chunk when a microphone would have it");
    app.add_option("FILE", options.files, "16-bit PCM WAV, mono or stereo, any rate; joined with pauses of 0.5 s")
        ->required();
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        return app.exit(error) == 0 ? 0 : 2;
    }
    const Result<> done = run(options);
    if (done) return 0;
    fmt::print(stderr, "vad_timeline: {}\n", done.error().text());
    return 1;
}
