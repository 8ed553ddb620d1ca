"""The board as a Hugging Face Space: plans and the doctor, nothing of the host."""

from accel_scale.board.app import BoardSettings, build_app, start, wait

demo = build_app(BoardSettings())

if __name__ == "__main__":
    print(start(demo, host="0.0.0.0", port=7860, hosts=()), flush=True)
    wait(demo)
