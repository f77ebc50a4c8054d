#pragma once

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include <fmt/format.h>

#include "ipc/base/error.h"

namespace bulkhead::example {

/// Mono samples in [-1, 1); the channels of a stereo file are averaged.
struct Sound {
    std::uint32_t rate_hz = 0;
    std::vector<float> samples;
};

/// Maximum size of a file: an hour of 48 kHz stereo is 0.7 GB.
inline constexpr std::uintmax_t wav_bytes_max = std::uintmax_t{1} << 30;

/// Reads RIFF/WAVE with 16-bit PCM, one or two channels, 1 to 384 kHz. Skips unknown chunks.
/// Errors  input_invalid naming what was found: truncated, not WAVE, another encoding
inline Result<Sound> parse_wav(const std::vector<char>& file) {
    const auto invalid = [](std::string what) {
        return Error{ErrorCode::input_invalid, std::move(what), "convert it, as with: sox IN -b 16 -c 1 OUT.wav"};
    };
    const auto number = [&]<typename T>(std::size_t at, T) {
        T value{};  // WAVE is little-endian, as is every machine this runs on
        std::memcpy(&value, file.data() + at, sizeof value);
        return value;
    };
    const auto tag = [&](std::size_t at) { return std::string_view{file.data() + at, 4}; };
    if (file.size() < 12 || tag(0) != "RIFF" || tag(8) != "WAVE") return invalid("no RIFF/WAVE file");

    Sound sound;
    std::uint16_t channels = 0;
    for (std::size_t at = 12;;) {
        if (file.size() - at < 8) return invalid("truncated: it ends before its samples");
        const std::string_view name = tag(at);
        const std::size_t size = number(at + 4, std::uint32_t{});
        at += 8;
        if (size > file.size() - at)
            return invalid(
                fmt::format("truncated: chunk \"{}\" should have {} bytes, {} are left", name, size, file.size() - at));
        if (name == "fmt ") {
            if (size < 16) return invalid("its format chunk is too short");
            std::uint16_t encoding = number(at, std::uint16_t{});
            if (encoding == 0xFFFE && size >= 26)
                encoding = number(at + 24, std::uint16_t{});  // WAVE_FORMAT_EXTENSIBLE
            channels = number(at + 2, std::uint16_t{});
            sound.rate_hz = number(at + 4, std::uint32_t{});
            const std::uint16_t bits = number(at + 14, std::uint16_t{});
            if (encoding != 1 || bits != 16)
                return invalid(fmt::format("encoding {} with {} bits; 16-bit PCM is read", encoding, bits));
            if (channels != 1 && channels != 2)
                return invalid(fmt::format("{} channels; one or two are read", channels));
            if (sound.rate_hz < 1'000 || sound.rate_hz > 384'000)
                return invalid(fmt::format("a rate of {} Hz", sound.rate_hz));
        } else if (name == "data") {
            if (channels == 0) return invalid("samples before their format");
            sound.samples.resize(size / (2u * channels));
            for (std::size_t i = 0; i < sound.samples.size(); ++i) {
                float sum = 0;
                for (std::size_t c = 0; c < channels; ++c) sum += number(at + 2 * (i * channels + c), std::int16_t{});
                sound.samples[i] = sum / (32768.0f * static_cast<float>(channels));
            }
            return sound;
        }
        at += size + size % 2;  // chunks are padded to an even length
        if (at > file.size()) return invalid("truncated: it ends before its samples");
    }
}

inline Result<Sound> read_wav(const std::filesystem::path& path) {
    const std::string attempt = fmt::format("reading {}", path.string());
    std::error_code failure;
    const std::uintmax_t size = std::filesystem::file_size(path, failure);
    std::ifstream stream{path, std::ios::binary};
    if (failure || !stream)
        return Error{ErrorCode::input_invalid,
                     fmt::format("{}: {}", attempt, failure ? failure.message() : std::strerror(errno)),
                     "name a WAV file that can be read"};
    if (size > wav_bytes_max) return Error{ErrorCode::input_invalid, attempt + ": more than 1 GiB", "split it"};
    const std::vector<char> file{std::istreambuf_iterator<char>{stream}, {}};
    Result<Sound> sound = parse_wav(file);
    if (!sound) return std::move(sound).error().during(attempt);
    return sound;
}

}  // namespace bulkhead::example
