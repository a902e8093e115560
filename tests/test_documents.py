"""Documents are read from whatever users have, and what cannot be used is counted or named."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from offset_runtime.documents import Document, Documents, read_documents
from offset_runtime.errors import DocumentError


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def jsonl(path: Path, *records: object) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def texts(documents: Documents) -> list[str]:
    return [document.text for document in documents.items]


def test_a_folder_is_read_with_its_subfolders_in_a_fixed_order(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "second")
    write(tmp_path / "a" / "deep" / "x.md", "first")
    jsonl(tmp_path / "c.jsonl", {"text": "third"}, {"text": "fourth"})
    assert texts(read_documents([tmp_path])) == ["first", "second", "third", "fourth"]


def test_several_sources_keep_their_order(tmp_path: Path) -> None:
    late, early = write(tmp_path / "z.txt", "z"), write(tmp_path / "a.txt", "a")
    assert texts(read_documents([late, early])) == ["z", "a"]


def test_files_of_another_type_in_a_folder_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "text")
    write(tmp_path / "picture.png", b"\x89PNG")
    write(tmp_path / "table.csv", "a,b")
    assert read_documents([tmp_path]).skipped == {"files of another type": 2}


def test_hidden_files_and_folders_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "text")
    write(tmp_path / ".hidden.txt", "no")
    write(tmp_path / ".git" / "description.txt", "no")
    found = read_documents([tmp_path])
    assert texts(found) == ["text"]
    assert not found.skipped


def test_a_folder_that_is_itself_hidden_is_read_when_asked_for(tmp_path: Path) -> None:
    write(tmp_path / ".corpus" / "a.txt", "text")
    assert texts(read_documents([tmp_path / ".corpus"])) == ["text"]


def test_a_folder_without_text_says_what_it_holds_and_what_is_expected(tmp_path: Path) -> None:
    write(tmp_path / "picture.png", b"\x89PNG")
    with pytest.raises(DocumentError, match=r"no documents in .*1 files of another type.*\.jsonl.*\.txt"):
        read_documents([tmp_path])


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="no documents in"):
        read_documents([tmp_path])


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"no file or folder .*nowhere"):
        read_documents([tmp_path / "nowhere"])


@pytest.mark.parametrize("name", ["data.json", "data.csv", "data.yaml"])
def test_a_data_file_is_refused_and_not_learned_as_text(tmp_path: Path, name: str) -> None:
    with pytest.raises(DocumentError, match=rf"{name} holds data.*\.jsonl"):
        read_documents([write(tmp_path / name, "[1, 2]")])


def test_a_single_file_of_any_other_suffix_is_one_text(tmp_path: Path) -> None:
    assert texts(read_documents([write(tmp_path / "module.py", "x = 1\n")])) == ["x = 1"]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    assert texts(read_documents([write(tmp_path / "a.txt", "one\n\ntwo\n")])) == ["one\n\ntwo"]


def test_lines_of_dashes_part_a_text_file(tmp_path: Path) -> None:
    found = read_documents([write(tmp_path / "a.txt", "one\n---\ntwo\n  ---  \n\n---\nthree -- and --- more\n")])
    assert texts(found) == ["one", "two", "three -- and --- more"]
    assert found.skipped == {"empty": 1}


def test_windows_line_ends_are_read(tmp_path: Path) -> None:
    assert texts(read_documents([write(tmp_path / "a.txt", "one\r\n---\r\ntwo\r\n")])) == ["one", "two"]


def test_unicode_line_separators_stay_inside_a_text(tmp_path: Path) -> None:
    text = "a\u2028b\x0cc\x85d"
    assert texts(read_documents([write(tmp_path / "a.txt", text)])) == [text]


def test_unicode_line_separators_do_not_end_a_json_line(tmp_path: Path) -> None:
    line = json.dumps({"text": "a\u2028b\u2029c\x85d"}, ensure_ascii=False)
    assert texts(read_documents([write(tmp_path / "a.jsonl", line)])) == ["a\u2028b\u2029c\x85d"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, name: str) -> None:
    content = "text" if name == "a.txt" else '{"text": "text"}'
    assert texts(read_documents([write(tmp_path / name, b"\xef\xbb\xbf" + content.encode())])) == ["text"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_a_file_in_another_encoding_is_left_out_and_counted(
    tmp_path: Path, encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "bad.txt", "Größe und Maß".encode(encoding))
    write(tmp_path / "good.txt", "text")
    with caplog.at_level(logging.WARNING, logger="offset_runtime"):
        found = read_documents([tmp_path])
    assert texts(found) == ["text"]
    assert found.skipped == {"not in UTF-8": 1}
    assert "left out 1 not in UTF-8; 1 documents remain" in caplog.text


def test_only_undecodable_files_are_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="1 not in UTF-8"):
        read_documents([write(tmp_path / "a.txt", "Größe".encode("utf-16"))])


def test_empty_lines_of_a_jsonl_file_are_passed_over(tmp_path: Path) -> None:
    found = read_documents([write(tmp_path / "a.jsonl", '\n{"text": "a"}\n\n   \n{"text": "b"}\n')])
    assert texts(found) == ["a", "b"]
    assert not found.skipped


def test_empty_documents_are_counted(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", {"text": "a"}, {"text": " \n"}, {"text": ""})
    write(tmp_path / "b.txt", "  \n")
    found = read_documents([tmp_path])
    assert texts(found) == ["a"]
    assert found.skipped == {"empty": 3}


def test_duplicates_are_left_out_and_counted_across_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    jsonl(tmp_path / "a.jsonl", {"text": "same"}, {"text": "other"}, {"text": "same"})
    write(tmp_path / "b.txt", "same\n")
    with caplog.at_level(logging.WARNING, logger="offset_runtime"):
        found = read_documents([tmp_path])
    assert texts(found) == ["same", "other"]
    assert "2 duplicated" in caplog.text


def test_nothing_left_out_gives_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="offset_runtime"):
        read_documents([write(tmp_path / "a.txt", "text")])
    assert caplog.text == ""


def test_half_a_surrogate_pair_is_left_out(tmp_path: Path) -> None:
    found = read_documents([write(tmp_path / "a.jsonl", '{"text": "bad \\ud83d"}\n{"text": "good \\ud83d\\ude00"}')])
    assert texts(found) == ["good 😀"]
    assert found.skipped == {"with half a character": 1}
    found.digest()


def test_conversations_keep_roles_and_order(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
    ]
    [document] = read_documents([jsonl(tmp_path / "a.jsonl", {"messages": turns})]).items
    assert document.messages == (("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"))


def test_prompt_and_completion_are_a_conversation(tmp_path: Path) -> None:
    [document] = read_documents([jsonl(tmp_path / "a.jsonl", {"prompt": "Q", "completion": "A"})]).items
    assert document.messages == (("user", "Q"), ("assistant", "A"))


def test_conversations_with_equal_text_and_other_roles_differ(tmp_path: Path) -> None:
    one = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    two = {"messages": [{"role": "system", "content": "a"}, {"role": "assistant", "content": "b"}]}
    found = read_documents([jsonl(tmp_path / "a.jsonl", one, two)])
    assert len(found.items) == 2
    first, second = (Documents([document]).digest() for document in found.items)
    assert first != second


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "cut', "not JSON"),
        ("plain words", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"n": ' + "1" * 5000 + "}", "not JSON"),
        ('["text"]', "found list; expected 'text'"),
        ("7", "found int"),
        ('{"txt": "a"}', r"found keys \['txt'\]; expected 'text', 'messages', or 'prompt' and 'completion'"),
        ('{"text": 7}', r"found keys \['text'\]"),
        ('{"prompt": "a"}', r"found keys \['prompt'\]"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "found {'role': 'robot'"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "content string"),
        ('{"messages": ["hello"]}', "found 'hello'"),
        ('{"messages": []}', "no assistant message"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no assistant message"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(DocumentError, match=rf"a\.jsonl, line 3: .*{complaint}"):
        read_documents([path])


def test_the_digest_follows_texts_and_order() -> None:
    one, two = Document("a"), Document("b")
    assert Documents([one, two]).digest() == Documents([one, two]).digest()
    assert Documents([one, two]).digest() != Documents([two, one]).digest()
    assert Documents([Document("ab")]).digest() != Documents([one, two]).digest()
