#!/bin/sh
# Speak, and read what you say as you say it:
#
#     examples/live.sh                                     Linux, with arecord
#     ffmpeg -v error -f avfoundation -i :0 -ac 1 -ar 16000 -f s16le - | examples/live.sh -        a Mac
#
# STENO_URL and STENO_API_KEY say where, and as whom.
set -eu
url=${STENO_URL:-http://127.0.0.1:8000}
if [ "${1:-}" = - ]; then source=cat; else source='arecord -q -f S16_LE -r 16000 -c 1 -t raw'; fi
$source | curl -sSN -X POST -T . \
    -H 'Content-Type: audio/pcm;rate=16000' -H "Authorization: Bearer ${STENO_API_KEY:-none}" \
    "$url/v1/audio/transcriptions?model=whisper-1&stream=true"
